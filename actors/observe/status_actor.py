"""A pipeline's status actor: leaders and drivers report to it what they do, `wan-tpu status` reads it.

A small actor that nothing depends on: requests under way and bring-ups go on when it is silent, so reports never raise,
and whoever reads it gets an answer in seconds or `StatusSilent`. What the pipeline is lies in Ray's own store of keys.
"""

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.experimental import internal_kv

from actors.errors import PipelineError, PipelineNotFound
from actors.observe.meters import PipelineMeters
from actors.observe.status_board import Activity, Outcome, ReplicaStatus, ReportedStatus, RequestStatus, StatusBoard
from actors.pipeline_spec import PipelineSpec
from cluster.gang.placement import surviving

__all__ = ["Activity", "Outcome", "ReplicaStatus", "ReportedStatus", "RequestStatus", "StatusActor", "StatusSilent"]

log = logging.getLogger(__name__)

NAMESPACE = "wan-tpu"
CLOSE_S = 10.0
ANSWER_S = 5.0  # Readers wait so long for an actor that answers in milliseconds where all is well.
REFRESH_S = 1.0  # Between two looks of the actor at what has expired.
RENEW_S = 10.0  # Drivers renew their requests so often; a report expires after `status_board.EXPIRY_S`.
MAX_PENDING = 1000  # Reports of one process that wait for a silent actor; more are dropped.


class StatusSilent(PipelineError):
    """The status actor doesn't answer now: nothing is known of what the pipeline does, nothing is wrong with it."""


class StatusActor:
    """A pipeline's status actor, as others call it; picklable."""

    def __init__(self, pipeline: str, actor: Any) -> None:
        self._pipeline, self._actor = pipeline, actor
        self._losing = False  # Whether the last report couldn't be sent: only the first one lost is logged.

    @classmethod
    def create(cls, pipeline: str, spec: PipelineSpec) -> "StatusActor":
        """Start the status actor of a pipeline, in place of one that a crash has left."""
        stale = cls.find(pipeline)
        if stale is not None:
            stale.close()
        name = {"name": f"{pipeline}-status", "namespace": NAMESPACE, "lifetime": "detached"}
        kind = surviving(_StatusActor).options(**name, max_pending_calls=MAX_PENDING)
        _keep(spec)
        return cls(pipeline, kind.remote())

    @classmethod
    def connect(cls, pipeline: str) -> "StatusActor":
        """Return the status actor of the pipeline of that name; raises `PipelineNotFound` when there is none."""
        found = cls.find(pipeline)
        if found is None:
            raise PipelineNotFound(f"there is no pipeline {pipeline!r} on this cluster, or it is being taken down")
        return found

    @classmethod
    def find(cls, pipeline: str) -> "StatusActor | None":
        """Return the status actor of a pipeline, None where there is none."""
        try:
            return cls(pipeline, ray.get_actor(f"{pipeline}-status", namespace=NAMESPACE))
        except ValueError:
            return None

    def changed(self, spec: PipelineSpec) -> None:
        """Replace what the pipeline is: another configuration was applied to it."""
        _keep(spec)

    def replica(self, name: str, seen: ReplicaStatus) -> None:
        """Report what a replica does; again within seconds, or it is taken for gone."""
        self._report("replica", name, seen)

    def started(self, pool: str, phases: Mapping[str, float]) -> None:
        """Report how long each phase of a replica's start took, seconds."""
        self._report("started", pool, dict(phases))

    def gone(self, name: str) -> None:
        """Report that a replica has ended."""
        self._report("gone", name)

    def request(self, key: str, stage: str, step: int = 0, steps: int = 0, seconds: float | None = None) -> None:
        """Report where a request is; seconds  of the step that it has just done."""
        self._report("request", key, stage, step, steps, seconds)

    def requests(self, driver: str, keys: Iterable[str]) -> None:
        """Report all requests that a driver has under way, waiting ones among them, every `RENEW_S`.

        Args:
            driver: A name that no other driver has.
            keys: Their ids. Those of an earlier report that aren't among them are forgotten.
        """
        self._report("requests", driver, list(keys))

    def handoff(self, stage: str, seconds: float, nbytes: int) -> None:
        """Report inputs that went from the object store to a stage's devices."""
        self._report("handoff", stage, seconds, nbytes)

    def ended(self, key: str, outcome: Outcome) -> None:
        """Report that a request has ended."""
        self._report("ended", key, outcome)

    def seen(self, timeout_s: float = ANSWER_S) -> ReportedStatus:
        """Return all of it; raises `StatusSilent` when the actor doesn't answer in time."""
        try:
            return ray.get(self._actor.seen.remote(), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            reason = f"{type(error).__name__} after at most {timeout_s:g} s"
            raise StatusSilent(f"the status of pipeline {self._pipeline!r} can't be read now ({reason})") from None

    def latest(self, timeout_s: float = ANSWER_S) -> ReportedStatus | None:
        """Return all of it, None when the actor doesn't answer in time."""
        try:
            return self.seen(timeout_s)
        except StatusSilent:
            return None

    def close(self) -> None:
        """End this actor, and return when its name is free, or another one's that was started meanwhile."""
        ray.kill(self._actor)
        until = time.monotonic() + CLOSE_S
        while self._has_name() and time.monotonic() < until:
            time.sleep(0.05)

    def _has_name(self) -> bool:
        found = StatusActor.find(self._pipeline)
        return found is not None and found._actor._actor_id == self._actor._actor_id

    def _report(self, method: str, *args: Any) -> None:
        """Call a method of the actor without waiting; what can't be sent is lost, and the work goes on."""
        try:
            getattr(self._actor, method).remote(*args)
            self._losing = False
        except Exception as error:
            if not self._losing:
                log.warning("reports on pipeline %s are lost: %s: %s", self._pipeline, type(error).__name__, error)
            self._losing = True


def _keep(spec: PipelineSpec) -> None:
    internal_kv._internal_kv_put(spec.settings.name, pickle.dumps(spec), namespace=NAMESPACE)


def kept_spec(pipeline: str) -> PipelineSpec | None:
    """Return what a pipeline was brought up with, None where there never was one; the status actor isn't asked."""
    kept = internal_kv._internal_kv_get(pipeline, namespace=NAMESPACE)
    return None if kept is None else pickle.loads(kept)


class _StatusActor:
    def __init__(self) -> None:
        self._board, self._lock = StatusBoard(PipelineMeters()), threading.Lock()
        threading.Thread(target=self._refresh, name="refresh", daemon=True).start()

    def replica(self, name: str, seen: ReplicaStatus) -> None:
        self._locked(self._board.replica, name, seen)

    def started(self, pool: str, phases: Mapping[str, float]) -> None:
        self._locked(self._board.started, pool, phases)

    def gone(self, name: str) -> None:
        self._locked(self._board.gone, name)

    def request(self, key: str, stage: str, step: int, steps: int, seconds: float | None) -> None:
        self._locked(self._board.request, key, stage, step, steps, seconds)

    def requests(self, driver: str, keys: list[str]) -> None:
        self._locked(self._board.requests, driver, keys)

    def handoff(self, stage: str, seconds: float, nbytes: int) -> None:
        self._locked(self._board.handoff, stage, seconds, nbytes)

    def ended(self, key: str, outcome: Outcome) -> None:
        self._locked(self._board.ended, key, outcome)

    def seen(self) -> ReportedStatus:
        with self._lock:
            return self._board.seen()

    def _locked(self, method: Callable[..., None], *args: Any) -> None:
        with self._lock:
            method(*args)

    def _refresh(self) -> None:
        while True:
            try:
                self._locked(self._board.refresh)
            except Exception:  # Without this thread nothing would expire any more.
                log.exception("the status can't be refreshed")
            time.sleep(REFRESH_S)
