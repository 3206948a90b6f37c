"""What a pipeline is doing right now: replicas and drivers tell it, `wan-tpu status` reads it.

A small actor, told without waiting for an answer: without it everything goes on, only nobody sees it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.errors import PipelineNotFound
from cluster.placement import off_hosts

NAMESPACE = "wan-tpu"
CLOSE_S = 10.0
KEPT_PROGRAMS = 1000
KEPT = 50  # steps and hand-offs that averages are taken over


@dataclass
class ReplicaSeen:
    """A replica: its pool, where its slice is, what it does and since when (`time.time()`)."""

    pool: str
    where: str
    doing: str
    since: float


@dataclass
class RequestSeen:
    """A request under way: its stage ("waiting" before the first), steps done of all, and when it came."""

    came: float
    stage: str = "waiting"
    step: int = 0
    steps: int = 0


@dataclass
class Handoffs:
    """The latest hand-offs to a stage: seconds and bytes of each."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    nbytes: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))


@dataclass(frozen=True)
class Compiled:
    """A program that a replica of a pool has compiled, the seconds, and when that was told (`time.time()`)."""

    pool: str
    program: str
    seconds: float
    told_s: float


@dataclass
class Seen:
    """All of it.

    step_s    the latest denoising steps' seconds, by stage; ended  how many requests ended, by how
    compiled  the latest programs that replicas have compiled
    """

    replicas: dict[str, ReplicaSeen] = field(default_factory=dict)
    requests: dict[str, RequestSeen] = field(default_factory=dict)
    handoffs: dict[str, Handoffs] = field(default_factory=dict)
    step_s: dict[str, deque[float]] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    compiled: deque[Compiled] = field(default_factory=lambda: deque(maxlen=KEPT_PROGRAMS))


class Board:
    """A way to the board; picklable."""

    def __init__(self, pipeline: str, actor: Any) -> None:
        self._pipeline, self._actor = pipeline, actor

    @classmethod
    def create(cls, pipeline: str, about: Any) -> "Board":
        """Make the board of a pipeline, in place of one that a crash has left.

        about  what is to be known of the pipeline: `actors.settings.About`
        """
        stale = cls.find(pipeline)
        if stale is not None:
            stale.close()
        kind: Any = ray.remote(_BoardActor).options(
            name=f"{pipeline}-board",
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            label_selector=off_hosts(),
        )
        return cls(pipeline, kind.remote(about))

    @classmethod
    def connect(cls, pipeline: str) -> "Board":
        """Return the board of the pipeline of that name; raises `PipelineNotFound` when there is none."""
        found = cls.find(pipeline)
        if found is None:
            raise PipelineNotFound(f"there is no pipeline {pipeline!r} on this cluster, or it is being taken down")
        return found

    @classmethod
    def find(cls, pipeline: str) -> "Board | None":
        """Return the board of a pipeline, None where there is none."""
        try:
            return cls(pipeline, ray.get_actor(f"{pipeline}-board", namespace=NAMESPACE))
        except ValueError:
            return None

    def replica(self, name: str, pool: str, where: str, doing: str) -> None:
        """Tell what a replica does."""
        self._actor.replica.remote(name, pool, where, doing)

    def gone(self, name: str) -> None:
        """Tell that a replica has ended."""
        self._actor.gone.remote(name)

    def request(self, key: str, stage: str, step: int = 0, steps: int = 0, seconds: float | None = None) -> None:
        """Tell where a request is; seconds  of the step that it has just done."""
        self._actor.request.remote(key, stage, step, steps, seconds)

    def handoff(self, stage: str, seconds: float, nbytes: int) -> None:
        """Tell of inputs that went from the object store to a stage's devices."""
        self._actor.handoff.remote(stage, seconds, nbytes)

    def compiled(self, pool: str, seconds: dict[str, float]) -> None:
        """Tell what a replica has compiled: program -> seconds."""
        self._actor.compiled.remote(pool, seconds)

    def ended(self, key: str, how: str) -> None:
        """Tell that a request has ended: "done", "failed" or "cancelled"."""
        self._actor.ended.remote(key, how)

    def seen(self) -> Seen:
        """Return all of it."""
        return ray.get(self._actor.seen.remote(), timeout=30)

    def about(self) -> Any:
        """Return what the board was made with."""
        return ray.get(self._actor.about.remote(), timeout=30)

    def close(self) -> None:
        """End the board, and return when its name is free."""
        ray.kill(self._actor)
        until = time.monotonic() + CLOSE_S
        while Board.find(self._pipeline) is not None and time.monotonic() < until:
            time.sleep(0.05)


class _BoardActor:
    def __init__(self, about: Any) -> None:
        self._about = about  # Ray gives it again to a board that it restarts
        self._seen = Seen()

    def about(self) -> Any:
        return self._about

    def replica(self, name: str, pool: str, where: str, doing: str) -> None:
        self._seen.replicas[name] = ReplicaSeen(pool, where, doing, time.time())

    def gone(self, name: str) -> None:
        self._seen.replicas.pop(name, None)

    def request(self, key: str, stage: str, step: int, steps: int, seconds: float | None) -> None:
        seen = self._seen.requests.setdefault(key, RequestSeen(time.time()))
        seen.stage, seen.step, seen.steps = stage, step, steps
        if seconds is not None:
            self._seen.step_s.setdefault(stage, deque(maxlen=KEPT)).append(seconds)

    def handoff(self, stage: str, seconds: float, nbytes: int) -> None:
        seen = self._seen.handoffs.setdefault(stage, Handoffs())
        seen.seconds.append(seconds)
        seen.nbytes.append(nbytes)

    def compiled(self, pool: str, seconds: dict[str, float]) -> None:
        now = time.time()
        self._seen.compiled.extend(Compiled(pool, program, spent, now) for program, spent in seconds.items())

    def ended(self, key: str, how: str) -> None:
        self._seen.requests.pop(key, None)
        self._seen.ended[how] = self._seen.ended.get(how, 0) + 1

    def seen(self) -> Seen:
        return self._seen
