"""What `wan-tpu status` shows: pools, slices, queues and requests, as the status actor and the cluster have them."""

import textwrap
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

from actors.observe.status_actor import ReplicaSeen, RequestSeen, Seen, StatusActor
from actors.pipeline.pools import find_spec, live_replicas
from actors.pipeline_spec import PipelineSpec
from cluster.inventory import SliceFound
from cluster.layout import Pool, Replicas

SHOWN, ON_A_LINE = 20, 6  # requests under way that are listed for people


@dataclass(frozen=True)
class PoolStatus:
    """A pool.

    wanted      least and most replicas; replicas  by name
    queue       requests that have reached its stages, but no slice computes them
    step_s      mean seconds of its latest denoising steps; handoff_s, handoff_bytes  of its latest hand-offs, from the
                object store to the devices; None where there were none
    differing   what its replicas compute with where they aren't alike, by name and replica: their videos differ, too
    """

    name: str
    slice: str
    stages: tuple[str, ...]
    wanted: tuple[int, int]
    replicas: dict[str, ReplicaSeen]
    queue: int
    step_s: float | None
    handoff_s: float | None
    handoff_bytes: float | None
    differing: dict[str, dict[str, str]]


@dataclass(frozen=True)
class PipelineStatus:
    """A pipeline that runs.

    chips    "emulated" where CPU devices stand for chips, "simulated" where nothing is computed
    requests  under way, by id; waiting  how many are not in the pipeline yet; ended  how many have ended, by how
    """

    name: str
    model: str
    layout: str
    chips: str
    pools: tuple[PoolStatus, ...]
    requests: dict[str, RequestSeen]
    waiting: int
    ended: dict[str, int]


def status_of(pipeline: str, slices: Sequence[SliceFound]) -> PipelineStatus | None:
    """Return the status of a pipeline that is on this cluster, None when there is none of that name."""
    spec, actor = find_spec(pipeline), StatusActor.find(pipeline)
    if spec is None or actor is None:
        return None
    return pipeline_status(spec, actor.seen(), slices, live_replicas(pipeline, spec.layout))


def pipeline_status(spec: PipelineSpec, seen: Seen, slices: Sequence[SliceFound], live: Set[str]) -> PipelineStatus:
    """Put a pipeline's status together; live: names of the replicas that are there (`pools.live_replicas`)."""
    seen.replicas = {name: replica for name, replica in seen.replicas.items() if name in live}
    settings = spec.settings
    inside = {key: request for key, request in seen.requests.items() if request.stage != "waiting"}
    emulated = any(found.emulated for found in slices)
    return PipelineStatus(
        name=settings.name,
        model=settings.checkpoint,
        layout=spec.layout.source,
        chips="emulated" if settings.chips == "real" and emulated else settings.chips,
        pools=tuple(_pool(pool, seen) for pool in spec.layout.pools),
        requests=inside,
        waiting=len(seen.requests) - len(inside),
        ended=dict(seen.ended),
    )


def text(status: PipelineStatus) -> str:
    """Return a pipeline's status as lines for people."""
    now = time.time()
    note = "" if status.chips == "real" else f" ({status.chips}: the seconds are not a TPU's)"
    lines = [f"pipeline {status.name}: {status.model}{note}", "pools"]
    for pool in status.pools:
        replicas = f"{len(pool.replicas)} of {Replicas(*pool.wanted)!s:<7}"
        lines.append(f"  {pool.name:<12} {pool.slice:<8} {replicas} queue {pool.queue:<4} {_facts(pool)}")
        lines += [
            f"    {name:<24} {textwrap.shorten(str(replica), 100, placeholder='…')}, {now - replica.since:.0f} s"
            for name, replica in pool.replicas.items()
        ]
        for what, values in pool.differing.items():
            each = ", ".join(f"{value or 'nothing'} on {name}" for name, value in values.items())
            lines.append(f"    not alike, so that their videos differ: {what} is {each}")
    lines.append("requests")
    for key, request in list(status.requests.items())[:SHOWN]:
        steps = f"step {request.step}/{request.steps}" if request.step else ""
        lines.append(f"  {key:<26} {request.stage:<13} {steps:<12} {now - request.came:.0f} s")
    if len(status.requests) > SHOWN:
        lines.append(f"  and {len(status.requests) - SHOWN} more")
    ended = ", ".join(f"{count} {how}" for how, count in sorted(status.ended.items())) or "none ended"
    lines.append(f"  {len(status.requests)} under way, {status.waiting} waiting, {ended}")
    return "\n".join(lines)


def under_way(seen: Seen) -> str:
    """Return where the requests are, in one line."""
    inside = {key: request for key, request in seen.requests.items() if request.stage != "waiting"}
    parts = [f"{key} {one.stage}" + (f" {one.step}/{one.steps}" if one.step else "") for key, one in inside.items()]
    counts = {"more": len(parts) - ON_A_LINE, "waiting": len(seen.requests) - len(parts)}
    return " · ".join(parts[:ON_A_LINE] + [f"{count} {what}" for what, count in counts.items() if count > 0])


def _pool(pool: Pool, seen: Seen) -> PoolStatus:
    replicas = {name: replica for name, replica in sorted(seen.replicas.items()) if replica.pool == pool.name}
    here = [key for key, request in seen.requests.items() if request.stage in pool.stages]
    computed = {key for replica in replicas.values() for _, key in replica.work}
    steps = [seconds for stage in pool.stages for seconds in seen.step_s.get(stage, ())]
    handoffs = [handoff for stage in pool.stages for handoff in seen.handoffs.get(stage, ())]
    return PoolStatus(
        name=pool.name,
        slice=str(pool.slice),
        stages=pool.stages,
        wanted=(pool.replicas.minimum, pool.replicas.maximum),
        replicas=replicas,
        queue=sum(key not in computed for key in here),
        step_s=_mean(steps),
        handoff_s=_mean([seconds for seconds, _ in handoffs]),
        handoff_bytes=_mean([nbytes for _, nbytes in handoffs]),
        differing=_differing({name: one.software for name, one in replicas.items() if one.software}),
    )


def _differing(software: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return what replicas compute with where it isn't the same for all, by its name and replica."""
    names = sorted({name for found in software.values() for name in found})
    values = {name: {replica: found.get(name, "") for replica, found in software.items()} for name in names}
    return {name: found for name, found in values.items() if len(set(found.values())) > 1}


def _facts(pool: PoolStatus) -> str:
    facts = [] if pool.step_s is None else [f"{pool.step_s:.3g} s a step"]
    if pool.handoff_s is not None and pool.handoff_bytes is not None:
        facts.append(f"hand-off {pool.handoff_s * 1000:.0f} ms, {pool.handoff_bytes / 1e6:.2f} MB")
    return ", ".join([*facts, "+".join(pool.stages)])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
