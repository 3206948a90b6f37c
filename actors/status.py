"""What `wan-tpu status` shows: pools, slices, queues and requests, put together from the board and the cluster."""

import dataclasses
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from actors.board import ReplicaSeen, RequestSeen, Seen
from actors.settings import About
from cluster.inventory import SliceFound

SHOWN = 20  # requests under way that are listed for people


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica: what it does and since when, seconds."""

    name: str
    where: str
    doing: str
    seconds: float


@dataclass(frozen=True)
class PoolStatus:
    """A pool.

    wanted      least and most replicas
    queue       requests that have reached its stages, but no slice computes them
    step_s      mean seconds of its latest denoising steps; handoff_s, handoff_bytes  of its latest hand-offs, from the
                object store to the devices; None where there were none
    """

    name: str
    slice: str
    stages: tuple[str, ...]
    wanted: tuple[int, int]
    replicas: tuple[ReplicaStatus, ...]
    queue: int
    step_s: float | None
    handoff_s: float | None
    handoff_bytes: float | None


@dataclass(frozen=True)
class RequestStatus:
    """A request under way: its stage, steps done of all, seconds since it came."""

    key: str
    stage: str
    step: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class PipelineStatus:
    """A pipeline that runs.

    chips    "emulated" where CPU devices stand for chips, "simulated" where nothing is computed
    waiting  requests that are not in the pipeline yet; ended  how many have ended, by how
    """

    name: str
    model: str
    layout: str
    chips: str
    pools: tuple[PoolStatus, ...]
    requests: tuple[RequestStatus, ...]
    waiting: int
    ended: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dataclasses.asdict(self)


def pipeline_status(told: About, seen: Seen, slices: Sequence[SliceFound], living: Set[str]) -> PipelineStatus:
    """Put a pipeline's status together; living: names of the replicas that are there (`pools.living`)."""
    seen.replicas = {name: replica for name, replica in seen.replicas.items() if name in living}
    settings, now = told.settings, time.time()
    requests = [
        RequestStatus(key, request.stage, request.step, request.steps, now - request.came)
        for key, request in seen.requests.items()
    ]
    emulated = any(found.emulated for found in slices)
    return PipelineStatus(
        name=settings.name,
        model=settings.checkpoint,
        layout=told.layout.source,
        chips="emulated" if settings.chips == "real" and emulated else settings.chips,
        pools=tuple(_pool(pool, seen, requests, now) for pool in told.layout.pools),
        requests=tuple(request for request in requests if request.stage != "waiting"),
        waiting=sum(request.stage == "waiting" for request in requests),
        ended=dict(seen.ended),
    )


def text(status: PipelineStatus) -> str:
    """Return a pipeline's status as lines for people."""
    note = "" if status.chips == "real" else f" ({status.chips}: the seconds are not a TPU's)"
    lines = [f"pipeline {status.name}: {status.model}{note}", "pools"]
    for pool in status.pools:
        least, most = pool.wanted
        wanted = str(least) if least == most else f"{least} to {most}"
        lines.append(
            f"  {pool.name:<12} {pool.slice:<8} {len(pool.replicas)} of {wanted:<7} queue {pool.queue:<4} "
            f"{_facts(pool)}"
        )
        lines += [
            f"    {replica.name:<24} {_shortened(replica.doing)}, {replica.seconds:.0f} s" for replica in pool.replicas
        ]
    lines.append("requests")
    for request in status.requests[:SHOWN]:
        steps = f"step {request.step}/{request.steps}" if request.step else ""
        lines.append(f"  {request.key:<26} {request.stage:<13} {steps:<12} {request.seconds:.0f} s")
    if len(status.requests) > SHOWN:
        lines.append(f"  and {len(status.requests) - SHOWN} more")
    ended = ", ".join(f"{count} {how}" for how, count in sorted(status.ended.items())) or "none ended"
    lines.append(f"  {len(status.requests)} under way, {status.waiting} waiting, {ended}")
    return "\n".join(lines)


def under_way(seen: Seen) -> str:
    """Return where the requests are, in one line."""
    parts = [f"{key} {_place(request)}" for key, request in seen.requests.items() if request.stage != "waiting"]
    waiting = sum(request.stage == "waiting" for request in seen.requests.values())
    return " · ".join([*parts[:6], *([f"{len(parts) - 6} more"] if len(parts) > 6 else [])]) + (
        f" · {waiting} waiting" if waiting else ""
    )


def _pool(pool: Any, seen: Seen, requests: Sequence[RequestStatus], now: float) -> PoolStatus:
    replicas = {name: replica for name, replica in seen.replicas.items() if replica.pool == pool.name}
    here = [request.key for request in requests if request.stage in pool.stages]
    computed = {key for replica in replicas.values() for key in replica.doing.partition(" of ")[2].split(", ")}
    steps = [seconds for stage in pool.stages for seconds in seen.step_s.get(stage, ())]
    handoffs = [seen.handoffs[stage] for stage in pool.stages if stage in seen.handoffs]
    return PoolStatus(
        name=pool.name,
        slice=str(pool.slice),
        stages=pool.stages,
        wanted=(pool.replicas.minimum, pool.replicas.maximum),
        replicas=tuple(_replica(name, replica, now) for name, replica in sorted(replicas.items())),
        queue=sum(key not in computed for key in here),
        step_s=_mean(steps),
        handoff_s=_mean([seconds for handoff in handoffs for seconds in handoff.seconds]),
        handoff_bytes=_mean([nbytes for handoff in handoffs for nbytes in handoff.nbytes]),
    )


def _replica(name: str, replica: ReplicaSeen, now: float) -> ReplicaStatus:
    return ReplicaStatus(name, replica.where, replica.doing, max(now - replica.since, 0.0))


def _facts(pool: PoolStatus) -> str:
    facts = [] if pool.step_s is None else [f"{pool.step_s:.3g} s a step"]
    if pool.handoff_s is not None and pool.handoff_bytes is not None:
        facts.append(f"hand-off {pool.handoff_s * 1000:.0f} ms, {pool.handoff_bytes / 1e6:.2f} MB")
    return ", ".join([*facts, "+".join(pool.stages)])


def _place(request: RequestSeen) -> str:
    return f"{request.stage} {request.step}/{request.steps}" if request.step else request.stage


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shortened(text_: str, most: int = 100) -> str:
    text_ = " ".join(text_.split())
    return text_ if len(text_) <= most else f"{text_[: most - 1]}…"
