"""What a pipeline is doing right now: leaders and drivers report it, `wan-tpu status` reads it.

A small actor: requests under way need nothing of it. Those who look for a pipeline find it by this actor, and whoever
waits for its pools learns from it which are ready, so leaders tell again every few seconds what they do. What the
pipeline is lies in Ray's own store of keys.
"""

import dataclasses
import pickle
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.experimental import internal_kv

from actors.errors import PipelineNotFound
from actors.observe.meters import PipelineMeters
from actors.pipeline_spec import PipelineSpec
from cluster.gang.placement import surviving

NAMESPACE = "wan-tpu"
CLOSE_S = 10.0
KEPT = 50  # steps and hand-offs that averages are taken over

Activity = Literal["starting", "loading", "compiling", "idle", "busy", "draining", "failed", "refused"]
Outcome = Literal["done", "failed", "cancelled"]


@dataclass
class ReplicaSeen:
    """A replica of a pool.

    where     its slice and hosts; detail  of what it does, or why it failed (is tried again) or was refused (isn't)
    work      (stage, request) of what its slice computes, or has paused
    since     when that was reported, `time.time()`
    software  what its hosts compute with, by name
    """

    pool: str
    where: str
    activity: Activity
    detail: str
    work: tuple[tuple[str, str], ...]
    since: float
    software: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        work = ", ".join(f"{stage} of {request}" for stage, request in self.work)
        return ": ".join(part for part in ("" if work else self.activity, work or self.detail) if part)


@dataclass
class RequestSeen:
    """A request under way: its stage ("waiting" before the first), steps done of all, and when it came."""

    came: float
    stage: str = "waiting"
    step: int = 0
    steps: int = 0


@dataclass
class Seen:
    """All of it.

    handoffs  (seconds, bytes) of the latest hand-offs to each stage
    step_s    the latest denoising steps' seconds, by stage; ended  how many requests ended, by outcome
    """

    replicas: dict[str, ReplicaSeen] = field(default_factory=dict)
    requests: dict[str, RequestSeen] = field(default_factory=dict)
    handoffs: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    step_s: dict[str, deque[float]] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)


class StatusActor:
    """A pipeline's status actor, as others call it; picklable."""

    def __init__(self, pipeline: str, actor: Any) -> None:
        self._pipeline, self._actor = pipeline, actor

    @classmethod
    def create(cls, pipeline: str, spec: PipelineSpec) -> "StatusActor":
        """Start the status actor of a pipeline, in place of one that a crash has left."""
        stale = cls.find(pipeline)
        if stale is not None:
            stale.close()
        kind = surviving(_StatusActor).options(name=f"{pipeline}-status", namespace=NAMESPACE, lifetime="detached")
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

    def replica(self, name: str, seen: ReplicaSeen) -> None:
        """Report what a replica does."""
        self._actor.replica.remote(name, seen)

    def started(self, pool: str, phases: dict[str, float]) -> None:
        """Report how long each phase of a replica's start took, seconds."""
        self._actor.started.remote(pool, phases)

    def gone(self, name: str) -> None:
        """Report that a replica has ended."""
        self._actor.gone.remote(name)

    def request(self, key: str, stage: str, step: int = 0, steps: int = 0, seconds: float | None = None) -> None:
        """Report where a request is; seconds  of the step that it has just done."""
        self._actor.request.remote(key, stage, step, steps, seconds)

    def handoff(self, stage: str, seconds: float, nbytes: int) -> None:
        """Report inputs that went from the object store to a stage's devices."""
        self._actor.handoff.remote(stage, seconds, nbytes)

    def ended(self, key: str, outcome: Outcome) -> None:
        """Report that a request has ended."""
        self._actor.ended.remote(key, outcome)

    def seen(self) -> Seen:
        """Return all of it."""
        return ray.get(self._actor.seen.remote(), timeout=30)

    def spec(self) -> PipelineSpec:
        """Return what the pipeline is."""
        return pickle.loads(internal_kv._internal_kv_get(self._pipeline, namespace=NAMESPACE))

    def close(self) -> None:
        """End the actor, and return when its name is free."""
        ray.kill(self._actor)
        until = time.monotonic() + CLOSE_S
        while StatusActor.find(self._pipeline) is not None and time.monotonic() < until:
            time.sleep(0.05)


def _keep(spec: PipelineSpec) -> None:
    internal_kv._internal_kv_put(spec.settings.name, pickle.dumps(spec), namespace=NAMESPACE)


class _StatusActor:
    def __init__(self) -> None:
        self._seen, self._meters = Seen(), PipelineMeters()

    def replica(self, name: str, seen: ReplicaSeen) -> None:
        before = self._seen.replicas.get(name)
        if before is None or dataclasses.replace(seen, since=before.since) != before:  # else it is told again
            self._seen.replicas[name] = seen
            if seen.activity == "draining" and (before is None or before.activity != "draining"):
                self._meters.drains.inc(tags={"pool": seen.pool})
        self._meters.show(
            ((one.pool, one.activity) for one in self._seen.replicas.values()),
            (one.stage for one in self._seen.requests.values()),
        )

    def started(self, pool: str, phases: dict[str, float]) -> None:
        self._meters.started(pool, phases)

    def gone(self, name: str) -> None:
        if (last := self._seen.replicas.pop(name, None)) is not None:
            self._meters.gone.inc(tags={"pool": last.pool})

    def request(self, key: str, stage: str, step: int, steps: int, seconds: float | None) -> None:
        seen = self._seen.requests.setdefault(key, RequestSeen(time.time()))
        seen.stage, seen.step, seen.steps = stage, step, steps
        if seconds is not None:
            self._seen.step_s.setdefault(stage, deque(maxlen=KEPT)).append(seconds)

    def handoff(self, stage: str, seconds: float, nbytes: int) -> None:
        self._seen.handoffs.setdefault(stage, deque(maxlen=KEPT)).append((seconds, nbytes))

    def ended(self, key: str, outcome: Outcome) -> None:
        self._seen.requests.pop(key, None)
        self._seen.ended[outcome] = self._seen.ended.get(outcome, 0) + 1
        self._meters.ended.inc(tags={"outcome": outcome})

    def seen(self) -> Seen:
        return self._seen
