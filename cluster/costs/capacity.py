"""Estimate the throughput, latency and cost of layouts, and find the cheapest that meets a demand.

A stage is described by the seconds that it takes per video on a kind of slice. Requests arrive at random (Poisson), and
each occupies a slice of a pool for the same time, that of the pool's stages: M/D/c queues, one after the other.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.costs.prices import Prices
from cluster.errors import NoCapacity
from cluster.layout import Layout, Pool, Replicas
from cluster.slice_spec import SliceSpec

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_REPLICAS = 10_000  # A layout that would need more replicas of a pool is left out.

StageSeconds = Mapping[str, Mapping[str, float]]  # Seconds per video, by kind of slice, then by stage.
Fits = Callable[[SliceSpec, Sequence[str]], bool]  # Returns whether a slice has memory for all these stages at once.


@dataclass(frozen=True)
class CapacityAssumptions:
    """The assumptions on which slices are available."""

    prices: Prices
    capacity: str = "on-demand"  # The capacity in the table of prices.
    region: str | None = None  # The region in the table of prices; None for the cheapest.
    busy: float = 0.8  # The largest share of its time that a pool may be busy; above it, queues would grow long.
    cold_start_s: float = 120.0  # Seconds until a slice that has been allocated makes videos.
    starts_a_day: float = 1.0  # How often each slice starts per day, after deployments and preemptions.

    @property
    def ready(self) -> float:
        """The share of the time paid for in which a slice can work."""
        return max(0.0, 1 - self.starts_a_day * self.cold_start_s / DAY_S)


@dataclass(frozen=True)
class PoolLoad:
    """One pool under a demand."""

    pool: Pool
    replicas: int
    seconds: float  # How long each video occupies a slice.
    busy: float  # The share of the time in which its slices are busy.
    wait_s: float  # The mean time that a video waits for a slice.


@dataclass(frozen=True)
class Estimate:
    """A layout under a demand."""

    name: str
    pools: tuple[PoolLoad, ...]  # Its pools under this demand.
    videos_an_hour: float  # The most videos that it can make per hour.
    to_a_video_s: float  # The mean time from a request to its video.
    dollars_an_hour: float  # The price of all its slices.
    dollars_a_video: float  # That price divided by the videos demanded per hour.

    @property
    def chips(self) -> int:
        return sum(load.replicas * load.pool.slice.chips for load in self.pools)

    @property
    def text(self) -> str:
        lines = ["pools:"]
        for load in self.pools:
            lines.append(f"  {load.pool.name}:")
            lines.append(f"    stages: [{', '.join(load.pool.stages)}]")
            lines.append(f"    slice: {load.pool.slice}")
            lines.append(f"    replicas: {load.replicas}")
        return "\n".join(lines) + "\n"


def estimate(
    layout: Layout, stage_seconds: StageSeconds, assumptions: CapacityAssumptions, videos_an_hour: float | None = None
) -> Estimate:
    """Estimate what a layout makes and costs with all the replicas that it may have.

    Args:
        videos_an_hour: The demand. By default, the demand that keeps the busiest pool busy for `assumptions.busy`.

    Raises:
        NoCapacity: The layout can't meet the demand.
        PriceError: A price is unknown.
    """
    counts = {pool.name: pool.replicas.maximum for pool in layout.pools}
    most = min(
        counts[pool.name] * HOUR_S * assumptions.ready / add_up_seconds(pool, stage_seconds) for pool in layout.pools
    )
    videos_needed = assumptions.busy * most if videos_an_hour is None else videos_an_hour
    if videos_needed >= most:
        raise NoCapacity(
            f"{layout.source} makes at most {most:.1f} videos an hour, but {videos_needed:.1f} are "
            "needed; give a layout with more replicas or larger slices"
        )
    loads = tuple(
        _estimate_load(pool, counts[pool.name], stage_seconds, assumptions, videos_needed) for pool in layout.pools
    )
    dollars = sum(
        load.replicas * assumptions.prices.slice_hour(load.pool.slice, assumptions.capacity, assumptions.region)
        for load in loads
    )
    to_a_video_s = sum(load.seconds + load.wait_s for load in loads)
    return Estimate(layout.source, loads, most, to_a_video_s, dollars, dollars / videos_needed)


def recommend(
    stage_seconds: StageSeconds,
    stages: Sequence[str],
    experts: Sequence[str],
    assumptions: CapacityAssumptions,
    videos_a_day: float,
    within_s: float,
    *,
    fits: Fits,
) -> list[Estimate]:
    """Find the layouts that meet a demand.

    Args:
        stage_seconds: What each stage takes, on the kinds of slices that may be used.
        experts: Those of its stages that denoise.
        within_s: The longest mean time from a request to its video.
        fits: Returns whether a slice has memory for all of some stages at once.

    Returns:
        Estimates for the layouts, cheapest first.

    Raises:
        NoCapacity: No layout is fast enough, in which case the message names the fastest, or no slice is large enough.
        PriceError: A price is unknown.
    """
    videos_an_hour = videos_a_day / 24
    estimates = [
        sized_layout
        for layout in _list_layouts(stage_seconds, stages, experts, fits)
        if (sized_layout := _size_pools(layout, stage_seconds, assumptions, videos_an_hour, within_s))
    ]
    if not estimates:
        raise NoCapacity(f"no stage of this model fits the memory of {', '.join(stage_seconds)}; give larger slices")
    enough = [candidate for candidate in estimates if candidate.to_a_video_s <= within_s]
    if not enough:
        best = min(estimates, key=lambda candidate: candidate.to_a_video_s)
        raise NoCapacity(
            f"the fastest of {len(estimates)} layouts takes {best.to_a_video_s:.0f} s for a video ({best.name}), "
            f"but the limit is {within_s:.0f} s; give larger slices, fewer steps or a smaller size"
        )
    return sorted(enough, key=lambda candidate: (candidate.dollars_an_hour, candidate.to_a_video_s))


def add_up_seconds(pool: Pool, stage_seconds: StageSeconds) -> float:
    """Return how long each video occupies a slice of a pool."""
    return sum(stage_seconds[pool.slice.name][stage] for stage in pool.stages)


def estimate_wait_s(replicas: int, seconds: float, videos_an_hour: float) -> float:
    """Return the mean wait for one of several slices, each of which takes the same time per video (M/D/c).

    It is half of the M/M/c queue's wait (Erlang's C formula), which is exact for one slice and within a tenth for
    several.
    """
    load = videos_an_hour * seconds / HOUR_S
    blocked = 1.0
    for count in range(1, replicas + 1):
        blocked = load * blocked / (count + load * blocked)
    delayed = blocked / (1 - (load / replicas) * (1 - blocked))
    return delayed * seconds / (replicas - load) / 2


def _estimate_load(
    pool: Pool, replicas: int, stage_seconds: StageSeconds, assumptions: CapacityAssumptions, videos_an_hour: float
) -> PoolLoad:
    # While some slices start, the others have more to do.
    seconds = add_up_seconds(pool, stage_seconds) / assumptions.ready
    busy = videos_an_hour * seconds / HOUR_S / replicas
    return PoolLoad(
        pool, replicas, seconds * assumptions.ready, busy, estimate_wait_s(replicas, seconds, videos_an_hour)
    )


def _list_layouts(
    stage_seconds: StageSeconds, stages: Sequence[str], experts: Sequence[str], fits: Fits
) -> Iterator[Layout]:
    """Yield the layouts to compare: all stages in one pool; experts in one and the rest in another; one pool each."""
    others = tuple(stage for stage in stages if stage not in experts)
    groupings: list[dict[str, tuple[str, ...]]] = [
        {"all": tuple(stages)},
        {"encoder-decoder": others, "experts": tuple(experts)},
        {stage: (stage,) for stage in stages},
    ]
    kinds = [SliceSpec(name) for name in stage_seconds]
    for grouping in groupings:
        for large in kinds:
            for small in kinds if len(grouping) > 1 else [large]:
                pools = [
                    Pool(name, pool_stages, large if set(pool_stages) & set(experts) else small)
                    for name, pool_stages in grouping.items()
                ]
                known = all(set(pool.stages) <= set(stage_seconds[pool.slice.name]) for pool in pools)
                if known and all(fits(pool.slice, pool.stages) for pool in pools):
                    split = f"{len(pools)} pools" if len(pools) > 1 else "one pool"
                    kinds_text = str(large) if large == small else f"{large} and {small}"
                    yield Layout(f"{split} on {kinds_text}", tuple(pools))


def _size_pools(
    layout: Layout,
    stage_seconds: StageSeconds,
    assumptions: CapacityAssumptions,
    videos_an_hour: float,
    within_s: float,
) -> Estimate | None:
    """Estimate a layout with as few replicas as the demand allows.

    Replicas are added until no pool is busier than it may be, and videos are fast enough or hardly wait. None if a pool
    would need more than `MOST_REPLICAS`.
    """
    counts = {
        pool.name: max(
            1,
            math.ceil(
                videos_an_hour * add_up_seconds(pool, stage_seconds) / HOUR_S / assumptions.ready / assumptions.busy
            ),
        )
        for pool in layout.pools
    }
    while True:
        if max(counts.values()) > MOST_REPLICAS:
            return None
        pools = tuple(
            dataclasses.replace(pool, replicas=Replicas(counts[pool.name], counts[pool.name])) for pool in layout.pools
        )
        estimated = estimate(dataclasses.replace(layout, pools=pools), stage_seconds, assumptions, videos_an_hour)
        longest = max(estimated.pools, key=lambda load: load.wait_s)
        if estimated.to_a_video_s <= within_s or longest.wait_s < 1.0:
            return estimated
        counts[longest.pool.name] += 1
