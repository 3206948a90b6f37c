"""The pipeline that a batch uses: one that runs on the cluster already, or one of its own for as long as it takes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray

from actors.errors import PipelineNotFound
from actors.observe.status_actor import NAMESPACE
from actors.pipeline.pools import Tell, deploy, find_spec, shut_down, wait_until_up
from actors.pipeline_spec import PipelineSpec
from cluster.gang.placement import surviving

# How long a pipeline that a batch took down may take over what it has: the batch has ended, nobody waits for it.
DRAIN_S = 20.0
ANSWER_S = 30.0  # of the actor of a batch that runs


@contextlib.contextmanager
def acquire_pipeline(
    name: str, wanted: PipelineSpec | None, tell: Tell = lambda text: None, *, precision: str | None = None
) -> Iterator[PipelineSpec]:
    """Use the pipeline of that name; bring up the wanted one when there is none, and take it down at the end.

    A pipeline that a batch has brought up for itself is not shared: it would be taken away. When its batch was
    killed, the next one takes it over if it is what it wants.

    Args:
        name: Of the pipeline.
        wanted: What to bring up; None to use only what runs.
        tell: Is told what is being waited for.
        precision: What a pipeline that is there must compute in; any where it is None.

    Raises:
        PipelineNotFound: There is none, or it isn't what is wanted. Besides, whatever `deploy` raises.
    """
    found = reusable(name, wanted, precision)
    if found is not None and found.lasting:
        tell(f"pipeline {name} runs")
        wait_until_up(found, tell)
        yield found
        return
    with _owned(name):
        if wanted is not None and found is not None and found.same_as(wanted):
            wait_until_up(found, tell)
        else:
            if found is not None:
                tell(f"taking down what a killed batch has left of {name}")
                shut_down(name, drain_s=DRAIN_S)
            if wanted is None:
                raise _none(name)
            deploy(wanted, tell=tell)
        try:
            yield wanted
        finally:
            if not wanted.lasting:
                tell(f"taking the pipeline {name} down")
                shut_down(name, drain_s=DRAIN_S)


def reusable(name: str, wanted: PipelineSpec | None, precision: str | None = None) -> PipelineSpec | None:
    """Return what would be used of what runs, None when one would be brought up; raises `PipelineNotFound`."""
    found = find_spec(name)
    if found is None:
        if wanted is None:
            raise _none(name)
        return None
    if not found.lasting and (owner := _owner(name)):
        raise _anothers(name, owner)
    if found.lasting or wanted is None:
        check_usable(found, wanted, precision)
    return found


def check_usable(found: PipelineSpec, wanted: PipelineSpec | None, precision: str | None) -> None:
    """Raise `PipelineNotFound` unless a pipeline that runs is of the model, layout and precision that are asked for.

    Args:
        found: What runs.
        wanted: What the command would bring up; None where it doesn't say.
        precision: What it asks for; None where it doesn't say.
    """
    name, runs = found.settings.name, found.settings
    remedy = "to use it, or choose another --name"
    if wanted is not None and runs.checkpoint != wanted.settings.checkpoint:
        raise PipelineNotFound(
            f"pipeline {name!r} runs {runs.checkpoint}, not {wanted.settings.checkpoint}; leave --model out {remedy}"
        )
    if precision is not None and runs.dtype != precision:
        raise PipelineNotFound(
            f"pipeline {name!r} computes in {runs.dtype}, not {precision}; leave --precision out {remedy}"
        )
    if wanted is not None and found.layout.pools != wanted.layout.pools:
        raise PipelineNotFound(
            f"pipeline {name!r} has the pools of {found.layout.source}, not of {wanted.layout.source}; leave --layout "
            f"and --model out {remedy}"
        )


def _none(name: str) -> PipelineNotFound:
    return PipelineNotFound(
        f"no pipeline {name!r} runs on this cluster; bring one up (wan-tpu pipeline up --layout ... --model ...), "
        "or give this command --layout and --model and it brings up its own"
    )


def _anothers(name: str, owner: str) -> PipelineNotFound:
    return PipelineNotFound(
        f"pipeline {name!r} belongs to a batch that runs ({owner}) and ends with it; wait for that, or choose "
        "another --name where there are slices for both (wan-tpu pipeline up makes one that batches share)"
    )


@contextlib.contextmanager
def _owned(pipeline: str) -> Iterator[None]:
    """Hold the name of a pipeline that is this driver's to bring up; raises `PipelineNotFound` where it is another's.

    A named actor that dies with this driver holds it: so others know whether a pipeline's batch is alive.

    It outlives its node: without, the pipeline would be taken for one that a killed batch has left.
    """
    who = f"Ray job {ray.get_runtime_context().get_job_id()}"
    try:
        actor = surviving(_Owner).options(name=f"{pipeline}-owner", namespace=NAMESPACE).remote(who)
    except ValueError:  # another batch was a moment earlier
        raise _anothers(pipeline, _owner(pipeline) or "which has just begun") from None
    ray.get(actor.who.remote())
    try:
        yield
    finally:
        ray.kill(actor)


def _owner(pipeline: str) -> str | None:
    """Return whose batch a pipeline belongs to, None when nobody's is alive."""
    try:
        actor: Any = ray.get_actor(f"{pipeline}-owner", namespace=NAMESPACE)
        return ray.get(actor.who.remote(), timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:  # it is on its way to another node: not dead
        return f"which hasn't answered for {ANSWER_S:g} s"
    except (ValueError, ray.exceptions.RayActorError):
        return None


class _Owner:
    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        return self._who
