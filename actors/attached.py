"""The pipeline that a batch uses: one that runs on the cluster already, or one of its own for as long as it takes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray

from actors.board import NAMESPACE
from actors.errors import PipelineNotFound
from actors.pools import Tell, about, deploy, shut_down, wait_until_up
from actors.settings import About

# How long a pipeline that a batch took down may take over what it has: the batch has ended, nobody waits for it.
DRAIN_S = 20.0


@contextlib.contextmanager
def attached(name: str, wanted: About | None, tell: Tell = lambda text: None) -> Iterator[About]:
    """Use the pipeline of that name; bring up the wanted one when there is none, and take it down at the end.

    A pipeline that a batch has brought up for itself is not shared: it would be taken away. When its batch was
    killed, the next one takes it over if it is what it wants.

    Raises `PipelineNotFound`, or as `deploy` does.
    """
    found = usable(name, wanted)
    if found is not None and found.lasting:
        tell(f"pipeline {name} runs")
        wait_until_up(found.layout, name, tell)
        yield found
        return
    owner = _Owner.begin(name)
    try:
        if found is not None and (wanted is None or not _same(found, wanted)):
            tell(f"taking down what a killed batch has left of {name}")
            shut_down(name, drain_s=DRAIN_S)
            found = None
        if found is not None:
            wait_until_up(found.layout, name, tell)
        elif wanted is None:
            raise _none(name)
        else:
            deploy(wanted.layout, wanted.settings, lasting=wanted.lasting, tell=tell)
            found = wanted
        try:
            yield found
        finally:
            if not (wanted is not None and wanted.lasting):
                tell(f"taking the pipeline {name} down")
                shut_down(name, drain_s=DRAIN_S)
    finally:
        owner.end()


def usable(name: str, wanted: About | None) -> About | None:
    """Return what would be used of what runs, None when one would be brought up; raises `PipelineNotFound`."""
    found = about(name)
    if found is None:
        if wanted is None:
            raise _none(name)
        return None
    if not found.lasting and (owner := _Owner.find(name)):
        raise PipelineNotFound(
            f"pipeline {name!r} belongs to a batch that runs ({owner}) and ends with it; wait for that, or choose "
            "another --name where there are slices for both (wan-tpu pipeline up makes one that batches share)"
        )
    if found.lasting and wanted is not None and found.settings.checkpoint != wanted.settings.checkpoint:
        raise PipelineNotFound(
            f"pipeline {name!r} runs {found.settings.checkpoint}, not {wanted.settings.checkpoint}; leave --model_id "
            "out to use it, or choose another --name"
        )
    return found


def _none(name: str) -> PipelineNotFound:
    return PipelineNotFound(
        f"no pipeline {name!r} runs on this cluster; bring one up (wan-tpu pipeline up --layout ... --model_id ...), "
        "or give this command --layout and --model_id and it brings up its own"
    )


def _same(found: About, wanted: About) -> bool:
    return (found.layout.pools, found.settings) == (wanted.layout.pools, wanted.settings)


class _Owner:
    """A named actor that dies with the driver that made it: so others know whether a pipeline's batch is alive."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def begin(cls, pipeline: str) -> "_Owner":
        who = f"Ray job {ray.get_runtime_context().get_job_id()}"
        options = {"name": f"{pipeline}-owner", "namespace": NAMESPACE, "num_cpus": 0}
        kind: Any = ray.remote(_OwnerActor)
        actor = kind.options(**options).remote(who)
        ray.get(actor.who.remote())
        return cls(actor)

    @classmethod
    def find(cls, pipeline: str) -> str | None:
        """Return who it is, None when nobody is alive."""
        try:
            actor: Any = ray.get_actor(f"{pipeline}-owner", namespace=NAMESPACE)
            return ray.get(actor.who.remote(), timeout=30)
        except (ValueError, ray.exceptions.RayActorError):
            return None

    def end(self) -> None:
        ray.kill(self._actor)


class _OwnerActor:
    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        return self._who
