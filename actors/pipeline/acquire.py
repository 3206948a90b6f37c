"""Get the pipeline for a batch: one that already runs on the cluster, or one that lasts only as long as the batch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray

from actors.errors import PipelineNotFound
from actors.observe.status_actor import NAMESPACE
from actors.pipeline.pools import OnStatus, deploy, find_spec, shut_down, wait_until_up
from actors.pipeline_spec import PipelineSpec
from cluster.gang.placement import make_restartable

# When a batch takes its pipeline down, remaining requests have this long to finish. The batch has ended, so nobody is
# waiting for them.
DRAIN_S = 20.0
ANSWER_S = 30.0  # The actor that holds a pipeline's name has this long to answer.


@contextlib.contextmanager
def acquire_pipeline(
    name: str, spec: PipelineSpec | None, on_status: OnStatus, *, precision: str | None
) -> Iterator[PipelineSpec]:
    """Use the pipeline of that name if it runs; otherwise bring up `spec`, and take it down at the end.

    A pipeline that a batch has brought up for itself is not shared, because it ends with that batch. If that batch was
    killed, the next batch takes the pipeline over, provided that its specification is the same.

    Args:
        spec: The pipeline to bring up; None to use only a pipeline that is already running.
        precision: The precision that a running pipeline must compute in; None for any.

    Raises:
        PipelineNotFound: The pipeline doesn't exist, or its specification differs. `deploy` raises further errors.
    """
    running = find_reusable(name, spec, precision)
    if running is not None and running.lasting:
        on_status(f"pipeline {name} runs")
        wait_until_up(running, on_status)
        yield running
        return
    with _hold_name(name):
        if spec is not None and running is not None and running.is_same_as(spec):
            wait_until_up(running, on_status)
        else:
            if running is not None:
                on_status(f"taking down what a killed batch has left of {name}")
                shut_down(name, drain_s=DRAIN_S)
            if spec is None:
                raise _build_not_found(name)
            deploy(spec, on_status=on_status)
        try:
            yield spec
        finally:
            if not spec.lasting:
                on_status(f"taking the pipeline {name} down")
                shut_down(name, drain_s=DRAIN_S)


def find_reusable(name: str, spec: PipelineSpec | None, precision: str | None) -> PipelineSpec | None:
    """Return the running pipeline to use, or None if one must be brought up; raises `PipelineNotFound`."""
    running = find_spec(name)
    if running is None:
        if spec is None:
            raise _build_not_found(name)
        return None
    if not running.lasting and (owner := _find_owner(name)):
        raise _build_not_shared(name, owner)
    if running.lasting or spec is None:
        check_usable(running, spec, precision)
    return running


def check_usable(running: PipelineSpec, spec: PipelineSpec | None, precision: str | None) -> None:
    """Raise `PipelineNotFound` unless a running pipeline has the model, layout and precision that a command asks for.

    Args:
        spec: The pipeline that the command would bring up; None if the command doesn't specify one.
        precision: The precision that the command asks for; None if it doesn't specify any.
    """
    name, runs = running.settings.name, running.settings
    remedy = "to use it, or choose another --name"
    if spec is not None and runs.checkpoint != spec.settings.checkpoint:
        raise PipelineNotFound(
            f"pipeline {name!r} runs {runs.checkpoint}, not {spec.settings.checkpoint}; omit --model {remedy}"
        )
    if precision is not None and runs.dtype != precision:
        raise PipelineNotFound(
            f"pipeline {name!r} computes in {runs.dtype}, not {precision}; omit --precision {remedy}"
        )
    if spec is not None and running.layout.pools != spec.layout.pools:
        raise PipelineNotFound(
            f"pipeline {name!r} has the pools of {running.layout.source}, not of {spec.layout.source}; omit "
            f"--layout and --model {remedy}"
        )


def _build_not_found(name: str) -> PipelineNotFound:
    return PipelineNotFound(
        f"no pipeline {name!r} runs on this cluster; start one (wan-tpu pipeline up --layout ... --model ...), or "
        "give this command --layout and --model, with which it starts its own"
    )


def _build_not_shared(name: str, owner: str) -> PipelineNotFound:
    return PipelineNotFound(
        f"pipeline {name!r} belongs to a running batch ({owner}) and ends with it; wait for that, or choose another "
        "--name if there are slices for both (wan-tpu pipeline up starts one that batches share)"
    )


@contextlib.contextmanager
def _hold_name(pipeline: str) -> Iterator[None]:
    """Own the name of a pipeline that this driver may bring up; raise `PipelineNotFound` if another driver owns it.

    The name is held by a named actor that dies with this driver, which tells others whether a pipeline's batch is
    alive. The actor is restarted when its node is lost. Otherwise the pipeline would look as if its batch had been
    killed.
    """
    owner = f"Ray job {ray.get_runtime_context().get_job_id()}"
    try:
        actor = make_restartable(_Owner).options(name=f"{pipeline}-owner", namespace=NAMESPACE).remote(owner)
    except ValueError:  # Another batch took the name a moment ago.
        raise _build_not_shared(pipeline, _find_owner(pipeline) or "which has just begun") from None
    ray.get(actor.describe.remote())
    try:
        yield
    finally:
        ray.kill(actor)


def _find_owner(pipeline: str) -> str | None:
    """Return who runs the batch that a pipeline belongs to, or None when no such batch is alive."""
    try:
        actor: Any = ray.get_actor(f"{pipeline}-owner", namespace=NAMESPACE)
        return ray.get(actor.describe.remote(), timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:  # The actor isn't dead; it is being moved to another node.
        return f"which hasn't answered for {ANSWER_S:g} s"
    except (ValueError, ray.exceptions.RayActorError):
        return None


class _Owner:
    def __init__(self, description: str) -> None:
        self._description = description

    def describe(self) -> str:
        return self._description
