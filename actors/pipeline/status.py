"""What `wan-tpu status` shows: pools, slices, queues and requests, as the status actor and the cluster have them."""

import textwrap
import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from actors.observe.status_actor import ReplicaStatus, ReportedStatus, RequestStatus, StatusActor
from actors.pipeline.pools import find_spec, live_replicas
from actors.pipeline_spec import PipelineSpec
from cluster.inventory import SliceFound
from cluster.layout import Pool, Replicas

SHOWN = 20  # Requests, and replicas of a pool, that are listed for people.
ON_A_LINE = 6  # Requests that are named in one line.


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
    replicas: dict[str, ReplicaStatus]
    queue: int
    step_s: float | None
    handoff_s: float | None
    handoff_bytes: float | None
    differing: dict[str, dict[str, str]]


@dataclass(frozen=True)
class PipelineStatus:
    """A pipeline that runs.

    chips      "emulated" where CPU devices stand for chips, "simulated" where nothing is computed
    requests   under way, by id, not all where there are very many; under_way  how many there are
    waiting    how many are not in the pipeline yet; ended  how many have ended, by how
    silent     whether the status actor doesn't answer: nothing is known then but which replicas live
    """

    name: str
    model: str
    layout: str
    chips: str
    pools: tuple[PoolStatus, ...]
    requests: dict[str, RequestStatus]
    under_way: int
    waiting: int
    ended: dict[str, int]
    silent: bool = False


def status_of(pipeline: str, slices: Sequence[SliceFound]) -> PipelineStatus | None:
    """Return the status of a pipeline that is on this cluster, None when there is none of that name."""
    spec = find_spec(pipeline)
    if spec is None:
        return None
    actor = StatusActor.find(pipeline)
    seen = None if actor is None else actor.latest()
    return pipeline_status(spec, seen, slices, live_replicas(pipeline, spec.layout))


def pipeline_status(
    spec: PipelineSpec, seen: ReportedStatus | None, slices: Sequence[SliceFound], live: Set[str]
) -> PipelineStatus:
    """Put a pipeline's status together.

    Args:
        spec: What the pipeline was brought up with.
        seen: What its status actor knows, None when that doesn't answer.
        slices: The cluster's.
        live: Names of the replicas that are there (`pools.live_replicas`).
    """
    silent, seen = seen is None, seen or ReportedStatus()
    seen.replicas = {name: replica for name, replica in seen.replicas.items() if name in live}
    if silent:
        seen.replicas = {name: _unknown(name) for name in live}
    settings = spec.settings
    unlisted = dict(seen.unlisted)
    waiting = len(seen.requests) + unlisted.pop("waiting", 0)
    inside = {key: request for key, request in seen.requests.items() if request.stage != "waiting"}
    emulated = any(found.emulated for found in slices)
    return PipelineStatus(
        name=settings.name,
        model=settings.checkpoint,
        layout=spec.layout.source,
        chips="emulated" if settings.chips == "real" and emulated else settings.chips,
        pools=tuple(_pool(pool, seen) for pool in spec.layout.pools),
        requests=inside,
        under_way=len(inside) + sum(unlisted.values()),
        waiting=waiting - len(inside),
        ended=dict(seen.ended),
        silent=silent,
    )


def text(status: PipelineStatus) -> str:
    """Return a pipeline's status as lines for people."""
    now = time.time()
    note = "" if status.chips == "real" else f" ({status.chips}: the seconds are not a TPU's)"
    lines = [f"pipeline {status.name}: {status.model}{note}"]
    if status.silent:
        lines.append("  its status actor doesn't answer: what replicas and requests do isn't known, and they go on")
    lines.append("pools")
    for pool in status.pools:
        replicas = f"{len(pool.replicas)} of {Replicas(*pool.wanted)!s:<7}"
        lines.append(f"  {pool.name:<12} {pool.slice:<8} {replicas} queue {pool.queue:<4} {_facts(pool)}")
        lines += [
            f"    {name:<24} {textwrap.shorten(str(replica), 100, placeholder='…')}, {_since(now, replica.since)}"
            for name, replica in list(pool.replicas.items())[:SHOWN]
        ]
        if len(pool.replicas) > SHOWN:
            rest = Counter(replica.activity for replica in list(pool.replicas.values())[SHOWN:])
            lines.append(f"    and {', '.join(f'{count} {activity}' for activity, count in sorted(rest.items()))}")
        for what, values in pool.differing.items():
            each = ", ".join(f"{value or 'nothing'} on {name}" for name, value in values.items())
            lines.append(f"    not alike, so that their videos differ: {what} is {each}")
    lines.append("requests")
    for key, request in list(status.requests.items())[:SHOWN]:
        steps = f"step {request.step}/{request.steps}" if request.step else ""
        lines.append(f"  {key:<26} {request.stage:<13} {steps:<12} {_since(now, request.came)}")
    if status.under_way > SHOWN:
        lines.append(f"  and {status.under_way - SHOWN} more")
    ended = ", ".join(f"{count} {how}" for how, count in sorted(status.ended.items())) or "none ended"
    lines.append(f"  {status.under_way} under way, {status.waiting} waiting, {ended}")
    return "\n".join(lines)


def under_way(seen: ReportedStatus) -> str:
    """Return where the requests are, in one line."""
    inside = {key: request for key, request in seen.requests.items() if request.stage != "waiting"}
    parts = [f"{key} {one.stage}" + (f" {one.step}/{one.steps}" if one.step else "") for key, one in inside.items()]
    unlisted = dict(seen.unlisted)
    waiting = len(seen.requests) - len(parts) + unlisted.pop("waiting", 0)
    counts = {"more": len(parts) + sum(unlisted.values()) - ON_A_LINE, "waiting": waiting}
    return " · ".join(parts[:ON_A_LINE] + [f"{count} {what}" for what, count in counts.items() if count > 0])


def _pool(pool: Pool, seen: ReportedStatus) -> PoolStatus:
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
        queue=sum(key not in computed for key in here) + sum(seen.unlisted.get(stage, 0) for stage in pool.stages),
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


def _unknown(name: str) -> ReplicaStatus:
    return ReplicaStatus(name.partition("/")[0], "", "unknown", "", (), time.time())


def _since(now: float, moment: float) -> str:
    """Return how long ago a moment on another machine's clock was, which may be ahead."""
    return f"{max(0.0, now - moment):.0f} s"


def _facts(pool: PoolStatus) -> str:
    facts = [] if pool.step_s is None else [f"{pool.step_s:.3g} s a step"]
    if pool.handoff_s is not None and pool.handoff_bytes is not None:
        facts.append(f"hand-off {pool.handoff_s * 1000:.0f} ms, {pool.handoff_bytes / 1e6:.2f} MB")
    return ", ".join([*facts, "+".join(pool.stages)])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
