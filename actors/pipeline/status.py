"""The status that `wan-tpu status` shows: pools, slices, queues and requests, from the status actor and the cluster."""

import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from actors.observe.status_actor import ReplicaStatus, ReportedStatus, RequestStatus, StatusActor
from actors.pipeline.pools import find_spec, list_live_replicas
from actors.pipeline_spec import PipelineSpec
from cluster.inventory import LiveSlice
from cluster.layout import Pool, Replicas

MAX_SHOWN = 20  # The most requests, and the most replicas of a pool, that the text lists.
MAX_ID = 26  # The most characters of a request's id in the text.
MAX_ON_LINE = 6  # The most requests that are named in one line.


@dataclass(frozen=True)
class PoolStatus:
    """The status of a pool."""

    name: str
    slice: str  # The kind of its slices.
    stages: tuple[str, ...]
    wanted: tuple[int, int]  # The minimum and maximum of replicas.
    replicas: dict[str, ReplicaStatus]
    queue: int  # How many requests have reached the pool's stages and wait for a slice.
    step_s: float | None  # Mean seconds of the latest denoising steps, or None.
    handoff_s: float | None  # Mean seconds of the latest hand-offs from the object store to the devices, or None.
    handoff_bytes: float | None  # Mean size of the latest hand-offs, or None.
    # Software that isn't the same on all replicas, by its name and replica. Their videos differ as well.
    differing: dict[str, dict[str, str]]


@dataclass(frozen=True)
class PipelineStatus:
    """The status of a running pipeline."""

    name: str
    model: str
    layout: str
    chips: str  # "emulated" where CPU devices stand in for chips, "simulated" where nothing is computed.
    pools: tuple[PoolStatus, ...]  # The pools, in the order of the layout.
    requests: dict[str, RequestStatus]  # Requests under way, by id; incomplete if there are very many.
    under_way: int
    waiting: int  # How many requests have not entered the pipeline yet.
    ended: dict[str, int]
    # Whether the status actor doesn't answer. If so, only the names of the live replicas are known.
    silent: bool = False


def read_status(pipeline: str, slices: Sequence[LiveSlice]) -> PipelineStatus | None:
    """Return the status of a pipeline on this cluster, or None when there is none of that name."""
    spec = find_spec(pipeline)
    if spec is None:
        return None
    actor = StatusActor.find(pipeline)
    reported = None if actor is None else actor.read_or_none()
    return build_status(spec, reported, slices, list_live_replicas(pipeline, spec.layout))


def build_status(
    spec: PipelineSpec, reported: ReportedStatus | None, slices: Sequence[LiveSlice], live: Set[str]
) -> PipelineStatus:
    """Return a pipeline's status.

    Args:
        reported: The reports of its status actor, or None if that doesn't answer.
        live: Names of the replicas that are alive (`pools.list_live_replicas`).
    """
    silent, reported = reported is None, reported or ReportedStatus()
    reported.replicas = {name: replica for name, replica in reported.replicas.items() if name in live}
    if silent:
        reported.replicas = {
            name: ReplicaStatus(name.partition("/")[0], "", "unknown", "", (), time.time()) for name in live
        }
    settings = spec.settings
    unlisted = dict(reported.unlisted)
    waiting = len(reported.requests) + unlisted.pop("waiting", 0)
    inside = {key: request for key, request in reported.requests.items() if request.stage != "waiting"}
    emulated = any(slice_.emulated for slice_ in slices)
    return PipelineStatus(
        name=settings.name,
        model=settings.checkpoint,
        layout=spec.layout.source,
        chips="emulated" if settings.chips == "real" and emulated else settings.chips,
        pools=tuple(_build_pool(pool, reported) for pool in spec.layout.pools),
        requests=inside,
        under_way=len(inside) + sum(unlisted.values()),
        waiting=waiting - len(inside),
        ended=dict(reported.ended),
        silent=silent,
    )


def format_status(status: PipelineStatus) -> str:
    """Return a pipeline's status as human-readable lines."""
    now = time.time()
    note = "" if status.chips == "real" else f" ({status.chips}: the seconds are not a TPU's)"
    lines = [f"pipeline {status.name}: {status.model}{note}"]
    if status.silent:
        lines.append("  its status actor doesn't answer: what replicas and requests do isn't known, and they go on")
    lines.append("pools")
    rows = [
        (pool.name, pool.slice, f"{len(pool.replicas)} of {Replicas(*pool.wanted)}", f"queue {pool.queue}")
        for pool in status.pools
    ]
    for pool, row in zip(status.pools, _align(rows), strict=True):
        lines.append(f"  {row}  {_format_facts(pool)}")
        lines += [
            f"    {name:<24} {textwrap.shorten(str(replica), 100, placeholder='…')}, {_format_age(now, replica.since)}"
            for name, replica in list(pool.replicas.items())[:MAX_SHOWN]
        ]
        if len(pool.replicas) > MAX_SHOWN:
            unlisted = Counter(replica.activity for replica in list(pool.replicas.values())[MAX_SHOWN:])
            lines.append(f"    and {', '.join(f'{count} {activity}' for activity, count in sorted(unlisted.items()))}")
        for name, values in pool.differing.items():
            each = ", ".join(f"{value or 'nothing'} on {replica}" for replica, value in values.items())
            lines.append(f"    not alike, so that their videos differ: {name} is {each}")
    lines.append("requests")
    step_s = {stage: pool.step_s for pool in status.pools for stage in pool.stages}
    shown = [
        (_shorten(key), request.stage, *_format_progress(request, step_s), _format_age(now, request.came))
        for key, request in list(status.requests.items())[:MAX_SHOWN]
    ]
    for row, request in zip(_align(shown), status.requests.values(), strict=False):
        choice = ": ".join(part for part in (request.slice, request.chosen) if part)
        lines.append(f"  {row}  {choice}".rstrip())
    if status.under_way > MAX_SHOWN:
        lines.append(f"  and {status.under_way - MAX_SHOWN} more")
    ends = ", ".join(f"{count} {ending}" for ending, count in sorted(status.ended.items())) or "none ended"
    lines.append(f"  {status.under_way} under way, {status.waiting} waiting, {ends}")
    return "\n".join(lines)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines whose columns begin at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _shorten(key: str) -> str:
    """Return a request's id, or the ends of a long one; --json has the whole."""
    return key if len(key) <= MAX_ID else f"{key[:15]}…{key[15 - MAX_ID + 1 :]}"


def _format_progress(request: RequestStatus, step_s: Mapping[str, float | None]) -> tuple[str, str, str]:
    """Return a request's step, what share of the steps is done, and how long the others take."""
    if not request.step or not request.steps:
        return "", "", ""
    seconds = step_s.get(request.stage)
    left = "" if seconds is None else f"{(request.steps - request.step) * seconds:.0f} s left"
    return f"step {request.step}/{request.steps}", f"{request.step * 100 // request.steps} %", left


def describe_requests(reported: ReportedStatus) -> str:
    """Return one line that says where the requests are."""
    parts = [
        f"{key} {request.stage}" + (f" {request.step}/{request.steps}" if request.step else "")
        for key, request in reported.requests.items()
        if request.stage != "waiting"
    ]
    unlisted = dict(reported.unlisted)
    waiting = len(reported.requests) - len(parts) + unlisted.pop("waiting", 0)
    counts = {"more": len(parts) + sum(unlisted.values()) - MAX_ON_LINE, "waiting": waiting}
    return " · ".join(parts[:MAX_ON_LINE] + [f"{count} {name}" for name, count in counts.items() if count > 0])


def _build_pool(pool: Pool, reported: ReportedStatus) -> PoolStatus:
    replicas = {name: replica for name, replica in sorted(reported.replicas.items()) if replica.pool == pool.name}
    pool_requests = [key for key, request in reported.requests.items() if request.stage in pool.stages]
    keys = {key for replica in replicas.values() for _, key in replica.work}
    steps = [seconds for stage in pool.stages for seconds in reported.step_s.get(stage, ())]
    handoffs = [handoff for stage in pool.stages for handoff in reported.handoffs.get(stage, ())]
    return PoolStatus(
        name=pool.name,
        slice=str(pool.slice),
        stages=pool.stages,
        wanted=(pool.replicas.minimum, pool.replicas.maximum),
        replicas=replicas,
        queue=sum(key not in keys for key in pool_requests)
        + sum(reported.unlisted.get(stage, 0) for stage in pool.stages),
        step_s=_compute_average(steps),
        handoff_s=_compute_average([seconds for seconds, _ in handoffs]),
        handoff_bytes=_compute_average([nbytes for _, nbytes in handoffs]),
        differing=_find_differing({name: replica.software for name, replica in replicas.items() if replica.software}),
    )


def _find_differing(software: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the software that isn't the same on all replicas, by its name and replica."""
    names = sorted({name for versions in software.values() for name in versions})
    by_name = {name: {replica: versions.get(name, "") for replica, versions in software.items()} for name in names}
    return {name: versions for name, versions in by_name.items() if len(set(versions.values())) > 1}


def _format_age(now: float, moment: float) -> str:
    """Return the age of a time stamp of another machine, whose clock may be ahead."""
    return f"{max(0.0, now - moment):.0f} s"


def _format_facts(pool: PoolStatus) -> str:
    facts = [] if pool.step_s is None else [f"{pool.step_s:.3g} s a step"]
    if pool.handoff_s is not None and pool.handoff_bytes is not None:
        facts.append(f"hand-off {pool.handoff_s * 1000:.0f} ms, {pool.handoff_bytes / 1e6:.2f} MB")
    return ", ".join([*facts, "+".join(pool.stages)])


def _compute_average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
