"""Figures of a pipeline under load: how close its throughput is to its slowest pool's limit, and what is lost."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.observe.span import Span
from actors.pipeline.driver import PipelineDriver
from cluster.layout import Layout
from wan_tpu.request import GenerationRequest


@dataclass
class Load:
    """The observations of a run: spans, and when each request ended (`time.time()`), by id."""

    requests: int
    in_flight: int
    spans: list[Span] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)

    @property
    def full(self) -> tuple[float, float]:
        """The measured period: from when every slice has had work until requests run out."""
        first: dict[str, float] = {}
        for span in self.spans:
            if span.kind == "compute":
                first[span.slice] = min(span.start_s, first.get(span.slice, span.start_s))
        times = sorted(self.ended.values())
        start, end = max(first.values()), times[max(0, len(times) - self.in_flight)]
        if end <= start:
            raise ValueError(
                f"{self.requests} requests, {self.in_flight} at a time, never fill the pipeline; take more"
            )
        return start, end


async def run(
    pipeline: PipelineDriver, requests: Mapping[str, GenerationRequest], in_flight: int
) -> tuple[Load, dict[str, bytes]]:
    """Make all videos, `in_flight` at a time; with fewer than twice as many, the pipeline is never full for long."""
    load, videos, room = Load(len(requests), in_flight), {}, asyncio.Semaphore(in_flight)

    async def generate(key: str, request: GenerationRequest) -> None:
        plan = pipeline.model.plan(request)
        async with room:
            videos[key] = (await pipeline.generate(plan, id=key, on_event=load.spans.append)).mp4
        load.ended[key] = time.time()
        await pipeline.forget(key)

    async with asyncio.TaskGroup() as group:
        for key, request in requests.items():
            group.create_task(generate(key, request))
    return load, videos


@dataclass(frozen=True)
class PoolFigures:
    """One pool while the pipeline was full.

    replicas   that computed; busy  share of their time; gap_s  between two steps of a request, median
    video_s    seconds of slice that a video takes by plan (or as measured, without a plan), over all replicas
    share      of what the pool could have done, by plan, in that time
    """

    name: str
    replicas: int
    busy: float
    gap_s: float
    step_s: float
    video_s: float
    share: float

    @property
    def bound_s(self) -> float:
        """Seconds between two videos if only this pool limited the rate."""
        return self.video_s / self.replicas


def pool_figures(layout: Layout, load: Load, planned_s: Mapping[str, float] | None) -> list[PoolFigures]:
    """Return the figures of all pools.

    Args:
        layout: The pools.
        load: The measured run.
        planned_s: The slice's seconds for a video, by stage; None for the measured ones.
    """
    start, end = load.full
    figures = []
    for pool in layout.pools:
        spans = [s for s in load.spans if s.pool == pool.name and s.kind == "compute"]
        seconds = {stage: sum(s.seconds for s in spans if s.stage == stage) / load.requests for stage in pool.stages}
        plan = seconds if planned_s is None else {stage: planned_s[stage] for stage in pool.stages}
        inside = {
            stage: sum(max(0.0, min(s.end_s, end) - max(s.start_s, start)) for s in spans if s.stage == stage)
            for stage in pool.stages
        }
        done = sum(inside[stage] * plan[stage] / seconds[stage] for stage in pool.stages if seconds[stage])
        time_s = pool.replicas.minimum * (end - start)
        figures.append(
            PoolFigures(
                name=pool.name,
                replicas=pool.replicas.minimum,
                busy=sum(inside.values()) / time_s,
                gap_s=_median(_gaps(spans)),
                step_s=_median([s.seconds for s in spans if s.step is not None]),
                video_s=sum(plan.values()),
                share=done / time_s,
            )
        )
    return figures


def between_requests(load: Load, pool: str) -> list[float]:
    """Return how many seconds slices of a pool stood idle between two requests while the pool was full of work."""
    start, end = load.full
    idle_s = []
    for name in {s.slice for s in load.spans if s.pool == pool}:
        mine = sorted(
            (s for s in load.spans if s.slice == name and s.kind == "compute" and start <= s.start_s <= end),
            key=lambda s: s.start_s,
        )
        idle_s += [b.start_s - a.end_s for a, b in itertools.pairwise(mine) if a.request != b.request]
    return idle_s


def videos_per_hour(load: Load) -> float:
    """Return the rate while the pipeline was full."""
    start, end = load.full
    return 3600 * sum(start < t <= end for t in load.ended.values()) / max(end - start, 1e-9)


def _gaps(spans: Sequence[Span]) -> list[float]:
    """Return the seconds between two steps of the same request on the same slice."""
    ordered = sorted((s for s in spans if s.step is not None), key=lambda s: (s.request, s.stage, s.step))
    return [
        b.start_s - a.end_s
        for a, b in itertools.pairwise(ordered)
        if (a.request, a.stage, a.slice) == (b.request, b.stage, b.slice)
    ]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
