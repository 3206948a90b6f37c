"""The state of a running pipeline, from reports of its replicas and drivers; reports that nobody renews expire."""

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from actors.observe.meters import PipelineMeters

EXPIRY_S = 60.0  # A report that nobody has renewed for this long is forgotten, because its process is gone.
UNNAMED_EXPIRY_S = 3600.0  # Expiry of a request that no driver has renewed yet, which may wait for long.
FAILED_EXPIRY_S = 600.0  # Expiry of a failed replica: its process is gone, but its reason is still of use.
MAX_FAILED = 20  # Failed replicas that are remembered.
MAX_LISTED = 2000  # The most requests that readers get individually; of all others they get counts.
MAX_SOFTWARE = 100  # The most different sets of software that replicas share.
MAX_SAMPLES = 50  # Averages are taken over this many of the latest steps and hand-offs of a stage.

Activity = Literal["starting", "loading", "compiling", "idle", "busy", "draining", "failed", "refused", "unknown"]
Outcome = Literal["done", "failed", "cancelled"]
FAILED: tuple[Activity, ...] = ("failed", "refused")

_EXPIRY_S: Mapping[Activity, float] = {
    "failed": FAILED_EXPIRY_S,
    "refused": FAILED_EXPIRY_S,
}


@dataclass
class ReplicaStatus:
    """A replica of a pool."""

    pool: str
    where: str  # The replica's slice and hosts.
    activity: Activity
    detail: str  # Details of the activity. If it failed (and is tried again) or was refused (and is not), the reason.
    work: tuple[tuple[str, str], ...]  # Stage and request of everything that the slice computes or has paused.
    since: float  # When that was reported, by `time.time()`.
    # The code, packages and flags that its hosts compute with, by name.
    software: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        work = ", ".join(f"{stage} of {request}" for stage, request in self.work)
        return ": ".join(part for part in ("" if work else self.activity, work or self.detail) if part)


@dataclass
class RequestStatus:
    """A request under way."""

    came: float
    stage: str = "waiting"  # The request's stage; "waiting" before the first.
    step: int = 0  # How many of the request's steps are done.
    steps: int = 0
    slice: str = ""  # The leader of the slice that runs the stage; "" until one has begun.
    chosen: str = ""  # Why the router chose that slice.


@dataclass
class ReportedStatus:
    """Everything that a pipeline's replicas and drivers have reported."""

    replicas: dict[str, ReplicaStatus] = field(default_factory=dict)
    requests: dict[str, RequestStatus] = field(default_factory=dict)  # Requests under way, by id, at most `MAX_LISTED`.
    unlisted: dict[str, int] = field(default_factory=dict)  # How many more requests there are, by stage.
    # Seconds and bytes of the latest hand-offs to each stage.
    handoffs: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    step_s: dict[str, deque[float]] = field(default_factory=dict)  # Seconds of the latest denoising steps, by stage.
    ended: dict[str, int] = field(default_factory=dict)


class StatusBoard:
    """Keeps the latest report of each replica and request. A report costs the same, however many there are."""

    def __init__(self, meters: PipelineMeters, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without reports; `clock` returns the seconds by which they expire."""
        self._meters, self._clock = meters, clock
        self._replicas: dict[str, ReplicaStatus] = {}
        self._requests: dict[str, RequestStatus] = {}
        self._drivers: dict[str, frozenset[str]] = {}  # Ids of the requests that each driver has under way.
        self._known_ids = set[str]()  # Ids that some driver has named.
        # When each replica, request and driver was last reported; the longest ago comes first.
        self._replica_s: dict[str, float] = {}
        self._request_s: dict[str, float] = {}
        self._driver_s: dict[str, float] = {}
        self._handoffs: dict[str, deque[tuple[float, int]]] = {}
        self._step_s: dict[str, deque[float]] = {}
        self._ended: Counter[str] = Counter()
        self._software: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}

    def report_replica(self, name: str, status: ReplicaStatus) -> None:
        """Take a replica's report. If nothing but the time has changed, the earlier time stays."""
        _renew(self._replica_s, name, self._clock())
        before = self._replicas.get(name)
        if before is not None and dataclasses.replace(status, since=before.since) == before:
            return
        self._replicas[name] = dataclasses.replace(status, software=self._share(status.software))
        if status.activity == "draining" and (before is None or before.activity != "draining"):
            self._meters.count_drain(status.pool)
        if status.activity in FAILED:
            self._forget_failures()

    def report_start(self, pool: str, phases: Mapping[str, float]) -> None:
        self._meters.count_start(pool, phases)

    def report_gone(self, name: str) -> None:
        self._replica_s.pop(name, None)
        last = self._replicas.pop(name, None)
        if last is not None:
            self._meters.count_gone(last.pool)

    def report_request(
        self, key: str, stage: str, step: int, steps: int, seconds: float | None, slice_: str = "", chosen: str = ""
    ) -> None:
        """Take a report of where a request is, as `StatusActor.report_request`."""
        _renew(self._request_s, key, self._clock())
        request = self._requests.setdefault(key, RequestStatus(time.time()))
        request.chosen = chosen or (request.chosen if slice_ == request.slice else "")
        request.stage, request.step, request.steps, request.slice = stage, step, steps, slice_
        if seconds is not None:
            self._step_s.setdefault(stage, deque(maxlen=MAX_SAMPLES)).append(seconds)

    def report_requests(self, driver: str, keys: Iterable[str]) -> None:
        """Renew all requests of a driver; those that it no longer names are forgotten."""
        now, ids = self._clock(), frozenset(keys)
        for key in self._drivers.get(driver, frozenset()) - ids:
            self._forget_request(key)
        for key in ids:
            self._requests.setdefault(key, RequestStatus(time.time()))
            _renew(self._request_s, key, now)
        self._known_ids |= ids
        self._drivers[driver] = ids
        _renew(self._driver_s, driver, now)

    def report_handoff(self, stage: str, seconds: float, nbytes: int) -> None:
        """Take a report of inputs that went from the object store to a stage's devices."""
        self._handoffs.setdefault(stage, deque(maxlen=MAX_SAMPLES)).append((seconds, nbytes))

    def report_end(self, key: str, outcome: Outcome) -> None:
        self._forget_request(key)
        self._ended[outcome] += 1
        self._meters.count_end(outcome)

    def refresh(self) -> None:
        """Forget what has expired, and update the metrics; to be called every second."""
        self._expire()
        self._meters.show(
            Counter[tuple[str, ...]]((replica.pool, replica.activity) for replica in self._replicas.values()),
            Counter(request.stage for request in self._requests.values()),
        )

    def read(self) -> ReportedStatus:
        """Return all reports. If there are too many requests to list, those that have left the queue come first."""
        self._expire()
        requests = self._requests
        unlisted: Counter[str] = Counter()
        if len(requests) > MAX_LISTED:
            keys = sorted(requests, key=lambda key: requests[key].stage == "waiting")
            unlisted = Counter(requests[key].stage for key in keys[MAX_LISTED:])
            requests = {key: requests[key] for key in keys[:MAX_LISTED]}
        return ReportedStatus(
            dict(self._replicas), dict(requests), dict(unlisted), self._handoffs, self._step_s, dict(self._ended)
        )

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, heard_s in self._replica_s.items() if now - heard_s > self._find_expiry_s(name)]:
            if self._replicas[name].activity in FAILED:
                del self._replicas[name], self._replica_s[name]
            else:
                self.report_gone(name)
        for key in _list_older(self._request_s, now - EXPIRY_S):
            if key in self._known_ids or self._request_s[key] < now - UNNAMED_EXPIRY_S:
                self._forget_request(key)
        for driver in _list_older(self._driver_s, now - EXPIRY_S):
            del self._driver_s[driver], self._drivers[driver]

    def _find_expiry_s(self, name: str) -> float:
        return _EXPIRY_S.get(self._replicas[name].activity, EXPIRY_S)

    def _forget_request(self, key: str) -> None:
        self._requests.pop(key, None)
        self._request_s.pop(key, None)
        self._known_ids.discard(key)

    def _share(self, software: dict[str, str]) -> dict[str, str]:
        """Return the dictionary that all replicas with this content share, so that readers get it once."""
        if len(self._software) >= MAX_SOFTWARE:
            self._software.clear()
        return self._software.setdefault(tuple(sorted(software.items())), software)

    def _forget_failures(self) -> None:
        """Keep the latest failures only, because a pool that can't start adds new ones for as long as it is tried."""
        failed = [name for name in self._replica_s if self._replicas[name].activity in FAILED]
        for name in failed[:-MAX_FAILED]:
            del self._replicas[name], self._replica_s[name]


def _renew(heard_s: dict[str, float], name: str, now: float) -> None:
    """Note when a name was last heard of, and put it last."""
    heard_s.pop(name, None)
    heard_s[name] = now


def _list_older(heard_s: Mapping[str, float], than_s: float) -> list[str]:
    """Return the names that were last heard of before a moment; the oldest come first."""
    names = []
    for name, moment in heard_s.items():
        if moment >= than_s:
            break
        names.append(name)
    return names
