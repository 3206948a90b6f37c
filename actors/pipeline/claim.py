"""The right to bring a pipeline up: one process of a cluster holds it at a time, and loses it when it dies."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ray

from actors.errors import PipelineExists
from actors.observe.status_actor import NAMESPACE
from cluster.gang.placement import make_restartable

FREE_S = 10.0  # A killed actor may keep its name for this long.


@contextlib.contextmanager
def claim_start(pipeline: str) -> Iterator[None]:
    """Hold the right to bring a pipeline up, so that two processes at once don't take each other's pools down.

    Ray's control store gives a name to one actor only. The actor isn't detached, so it ends with this process.

    Raises:
        PipelineExists: Another process is bringing it up.
    """
    name = f"{pipeline}-start"
    try:
        claim: Any = make_restartable(_Claim).options(name=name, namespace=NAMESPACE).remote()
    except ValueError:
        raise PipelineExists(
            f"a pipeline {pipeline!r} is being started on this cluster by another command; wait for that, "
            "or choose another --name"
        ) from None
    try:
        yield
    finally:
        ray.kill(claim)
        _wait_until_free(name)


def _wait_until_free(name: str) -> None:
    """Wait until nobody holds the name, so that the next command can take it."""
    until = time.monotonic() + FREE_S
    while time.monotonic() < until:
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(0.02)


class _Claim:
    """An actor that does nothing but hold its name."""
