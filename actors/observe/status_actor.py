"""A pipeline's status actor: leaders and drivers report to it what they do, and `wan-tpu status` reads it.

Nothing depends on this small actor: requests under way and bring-ups go on when it is silent. So reports never raise,
and readers get an answer in seconds, or `StatusSilent`. The pipeline's specification lies in Ray's key-value store.
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
from cluster.gang.placement import make_restartable

__all__ = ["Activity", "Outcome", "ReplicaStatus", "ReportedStatus", "RequestStatus", "StatusActor", "StatusSilent"]

log = logging.getLogger(__name__)

NAMESPACE = "wan-tpu"
CLOSE_S = 10.0  # A killed actor may keep its name for this long.
ANSWER_S = 5.0  # Readers wait this long for an actor that normally answers in milliseconds.
REFRESH_S = 1.0  # Seconds between two checks for expired reports.
RENEW_S = 10.0  # Drivers renew their requests this often; a report expires after `status_board.EXPIRY_S`.
MAX_PENDING = 1000  # Reports of one process that wait for a silent actor; more are dropped.


class StatusSilent(PipelineError):
    """The status actor doesn't answer now; that says nothing about the pipeline."""


class StatusActor:
    """A handle to a pipeline's status actor; picklable."""

    def __init__(self, pipeline: str, actor: Any) -> None:
        self._pipeline, self._actor = pipeline, actor
        self._losing = False  # Whether the last report couldn't be sent; only the first lost one is logged.

    @classmethod
    def create(cls, pipeline: str, spec: PipelineSpec) -> "StatusActor":
        """Start the status actor of a pipeline, in place of any that a crash has left."""
        stale = cls.find(pipeline)
        if stale is not None:
            stale.close()
        name = {"name": f"{pipeline}-status", "namespace": NAMESPACE, "lifetime": "detached"}
        kind = make_restartable(_StatusActor).options(**name, max_pending_calls=MAX_PENDING)
        _store_spec(spec)
        return cls(pipeline, kind.remote())

    @classmethod
    def connect(cls, pipeline: str) -> "StatusActor":
        """Return the status actor of the pipeline of that name; raise `PipelineNotFound` when there is none."""
        status = cls.find(pipeline)
        if status is None:
            raise PipelineNotFound(f"there is no pipeline {pipeline!r} on this cluster, or it is being taken down")
        return status

    @classmethod
    def find(cls, pipeline: str) -> "StatusActor | None":
        try:
            return cls(pipeline, ray.get_actor(f"{pipeline}-status", namespace=NAMESPACE))
        except ValueError:
            return None

    def replace_spec(self, spec: PipelineSpec) -> None:
        """Replace the pipeline's specification, after another configuration was applied to it."""
        _store_spec(spec)

    def report_replica(self, name: str, status: ReplicaStatus) -> None:
        """Report what a replica is doing. Without another, it counts as gone: in a minute, a failed one in ten."""
        self._report("report_replica", name, status)

    def report_start(self, pool: str, phases: Mapping[str, float]) -> None:
        """Report the seconds that each phase of a replica's start took."""
        self._report("report_start", pool, dict(phases))

    def report_gone(self, name: str) -> None:
        self._report("report_gone", name)

    def report_request(
        self,
        key: str,
        stage: str,
        step: int = 0,
        steps: int = 0,
        seconds: float | None = None,
        slice_: str = "",
        chosen: str = "",
    ) -> None:
        """Report where a request is.

        Args:
            seconds: How long the step that has just ended took.
            slice_: The leader of the slice that runs the stage; "" until one has begun.
            chosen: Why the router chose that slice, in the first report from there.
        """
        self._report("report_request", key, stage, step, steps, seconds, slice_, chosen)

    def report_requests(self, driver: str, keys: Iterable[str]) -> None:
        """Report all requests that a driver has under way, including those that wait, every `RENEW_S`.

        Args:
            driver: A name that no other driver has.
            keys: The requests' ids. Those of an earlier report that aren't among them are forgotten.
        """
        self._report("report_requests", driver, list(keys))

    def report_handoff(self, stage: str, seconds: float, nbytes: int) -> None:
        """Report inputs that went from the object store to a stage's devices."""
        self._report("report_handoff", stage, seconds, nbytes)

    def report_end(self, key: str, outcome: Outcome) -> None:
        self._report("report_end", key, outcome)

    def read(self, timeout_s: float = ANSWER_S) -> ReportedStatus:
        """Return everything reported; raise `StatusSilent` when the actor doesn't answer in time."""
        try:
            return ray.get(self._actor.read.remote(), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            reason = f"{type(error).__name__} after at most {timeout_s:g} s"
            raise StatusSilent(f"the status of pipeline {self._pipeline!r} can't be read now ({reason})") from None

    def read_or_none(self, timeout_s: float = ANSWER_S) -> ReportedStatus | None:
        """Return everything reported, or None when the actor doesn't answer in time."""
        try:
            return self.read(timeout_s)
        except StatusSilent:
            return None

    def close(self) -> None:
        """End this actor, and return when its name is free, or taken by another that was started meanwhile."""
        ray.kill(self._actor)
        until = time.monotonic() + CLOSE_S
        while self._has_name() and time.monotonic() < until:
            time.sleep(0.05)

    def _has_name(self) -> bool:
        current = StatusActor.find(self._pipeline)
        return current is not None and current._actor._actor_id == self._actor._actor_id

    def _report(self, method: str, *args: Any) -> None:
        """Call a method of the actor's board without waiting. A report that can't be sent is lost; the work goes on."""
        try:
            self._actor.report.remote(method, *args)
            self._losing = False
        except Exception as error:
            if not self._losing:
                log.warning("reports on pipeline %s are lost: %s: %s", self._pipeline, type(error).__name__, error)
            self._losing = True


def _store_spec(spec: PipelineSpec) -> None:
    internal_kv._internal_kv_put(spec.settings.name, pickle.dumps(spec), namespace=NAMESPACE)


def read_spec(pipeline: str) -> PipelineSpec | None:
    """Return a pipeline's specification without asking the status actor; None if there never was such a pipeline."""
    content = internal_kv._internal_kv_get(pipeline, namespace=NAMESPACE)
    return None if content is None else pickle.loads(content)


class _StatusActor:
    def __init__(self) -> None:
        self._board, self._lock = StatusBoard(PipelineMeters()), threading.Lock()
        threading.Thread(target=self._refresh, name="refresh", daemon=True).start()

    def report(self, method: str, *args: Any) -> None:
        """Take a report, for which the board has a method."""
        self._call_locked(getattr(self._board, method), *args)

    def read(self) -> ReportedStatus:
        with self._lock:
            return self._board.read()

    def _call_locked(self, method: Callable[..., None], *args: Any) -> None:
        with self._lock:
            method(*args)

    def _refresh(self) -> None:
        while True:
            try:
                self._call_locked(self._board.refresh)
            except Exception:  # Without this thread nothing would expire any more.
                log.exception("the status can't be refreshed")
            time.sleep(REFRESH_S)
