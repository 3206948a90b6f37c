"""What layouts make and cost: videos an hour, seconds to a video, dollars a video; and which one meets a demand.

Stages are known by the seconds that a video takes of them on a kind of slice. Videos come at any time of the day
(Poisson), each keeps a slice of a pool for the seconds of its stages, always the same: M/D/c queues, one after the
other.
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
MOST_REPLICAS = 10_000


StageSeconds = Mapping[str, Mapping[str, float]]  # Of a video, by kind of slice, then by stage.
Fits = Callable[[SliceSpec, Sequence[str]], bool]  # Whether a slice has memory for stages together.


@dataclass(frozen=True)
class Terms:
    """On which terms slices are had.

    capacity, region  as in the table of prices
    busy              the share of its time that a pool may be busy: more, and a queue grows
    cold_start_s      until a slice that was given makes videos; starts_a_day  how often each starts: deployments,
                      preemptions
    """

    prices: Prices
    capacity: str = "on-demand"
    region: str | None = None
    busy: float = 0.8
    cold_start_s: float = 120.0
    starts_a_day: float = 1.0

    @property
    def ready(self) -> float:
        """The share of its time that a slice which is paid for can work."""
        return max(0.0, 1 - self.starts_a_day * self.cold_start_s / DAY_S)


@dataclass(frozen=True)
class PoolLoad:
    """One pool under a demand: seconds a video, how busy its slices are, how long a video waits for one."""

    pool: Pool
    replicas: int
    seconds: float
    busy: float
    wait_s: float


@dataclass(frozen=True)
class Estimate:
    """A layout under a demand.

    videos_an_hour   that it makes at most; to_a_video_s  from asking to having it, in the mean
    dollars_an_hour  of all its slices; dollars_a_video  of those that are asked for
    """

    name: str
    pools: tuple[PoolLoad, ...]
    videos_an_hour: float
    to_a_video_s: float
    dollars_an_hour: float
    dollars_a_video: float

    @property
    def chips(self) -> int:
        """Of all slices."""
        return sum(load.replicas * load.pool.slice.chips for load in self.pools)

    @property
    def text(self) -> str:
        """As a layout file."""
        lines = ["pools:"]
        for load in self.pools:
            lines.append(f"  {load.pool.name}:")
            lines.append(f"    stages: [{', '.join(load.pool.stages)}]")
            lines.append(f"    slice: {load.pool.slice}")
            lines.append(f"    replicas: {load.replicas}")
        return "\n".join(lines) + "\n"


def estimate(
    layout: Layout, stage_seconds: StageSeconds, terms: Terms, videos_an_hour: float | None = None
) -> Estimate:
    """Return what a layout makes and costs with all the replicas that it may have.

    videos_an_hour  that are asked for; None: as many as keep its busiest pool busy for the share of `terms`

    Raises `NoCapacity` for a demand that it can't meet, `PriceError`.
    """
    counts = {pool.name: pool.replicas.maximum for pool in layout.pools}
    most = min(counts[pool.name] * HOUR_S * terms.ready / seconds_of(pool, stage_seconds) for pool in layout.pools)
    asked = terms.busy * most if videos_an_hour is None else videos_an_hour
    if asked >= most:
        raise NoCapacity(f"{layout.source} makes {most:.1f} videos an hour at most, {asked:.1f} are asked for")
    loads = tuple(_load(pool, counts[pool.name], stage_seconds, terms, asked) for pool in layout.pools)
    dollars = sum(
        load.replicas * terms.prices.slice_hour(load.pool.slice, terms.capacity, terms.region) for load in loads
    )
    to_a_video_s = sum(load.seconds + load.wait_s for load in loads)
    return Estimate(layout.source, loads, most, to_a_video_s, dollars, dollars / asked)


def recommended(
    stage_seconds: StageSeconds,
    stages: Sequence[str],
    experts: Sequence[str],
    terms: Terms,
    videos_a_day: float,
    within_s: float,
    *,
    fits: Fits,
) -> list[Estimate]:
    """Return the layouts that make so many videos a day, each within so many seconds in the mean; cheapest first.

    stage_seconds  on the kinds of slices that may be used; stages  of the model, of which experts denoise
    fits           whether a slice has memory for stages together

    Raises `NoCapacity` with the fastest when none is fast enough, `PriceError`.
    """
    an_hour = videos_a_day / 24
    estimates = [
        sized
        for layout in _layouts(stage_seconds, stages, experts, fits)
        if (sized := _sized(layout, stage_seconds, terms, an_hour, within_s))
    ]
    if not estimates:
        raise NoCapacity(f"no stage of this model fits {', '.join(stage_seconds)}; give larger slices")
    enough = [candidate for candidate in estimates if candidate.to_a_video_s <= within_s]
    if not enough:
        best = min(estimates, key=lambda candidate: candidate.to_a_video_s)
        raise NoCapacity(
            f"the fastest of {len(estimates)} layouts takes {best.to_a_video_s:.0f} s to a video ({best.name}), within "
            f"{within_s:.0f} s is asked; give larger slices, fewer steps or a smaller size"
        )
    return sorted(enough, key=lambda candidate: (candidate.dollars_an_hour, candidate.to_a_video_s))


def seconds_of(pool: Pool, stage_seconds: StageSeconds) -> float:
    """Return how long a video keeps a slice of a pool."""
    return sum(stage_seconds[pool.slice.name][stage] for stage in pool.stages)


def waiting_s(replicas: int, seconds: float, an_hour: float) -> float:
    """Return the mean wait for one of so many slices that each keep a video for the same seconds (M/D/c).

    Half of the M/M/c queue's, Erlang's C: exact for one slice, within a tenth for several.
    """
    load = an_hour * seconds / HOUR_S
    blocked = 1.0
    for count in range(1, replicas + 1):
        blocked = load * blocked / (count + load * blocked)
    delayed = blocked / (1 - (load / replicas) * (1 - blocked))
    return delayed * seconds / (replicas - load) / 2


def _load(pool: Pool, replicas: int, stage_seconds: StageSeconds, terms: Terms, an_hour: float) -> PoolLoad:
    seconds = seconds_of(pool, stage_seconds) / terms.ready  # while some start, the others have more to do
    busy = an_hour * seconds / HOUR_S / replicas
    return PoolLoad(pool, replicas, seconds * terms.ready, busy, waiting_s(replicas, seconds, an_hour))


def _layouts(
    stage_seconds: StageSeconds, stages: Sequence[str], experts: Sequence[str], fits: Fits
) -> Iterator[Layout]:
    """Yield what is compared: all stages on one slice; the experts, and the ends; each stage by itself."""
    ends = tuple(stage for stage in stages if stage not in experts)
    groupings: list[dict[str, tuple[str, ...]]] = [
        {"all": tuple(stages)},
        {"ends": ends, "experts": tuple(experts)},
        {stage: (stage,) for stage in stages},
    ]
    kinds = [SliceSpec(name) for name in stage_seconds]
    for grouping in groupings:
        for large in kinds:
            for small in kinds if len(grouping) > 1 else [large]:
                pools = [
                    Pool(name, hosted, large if set(hosted) & set(experts) else small)
                    for name, hosted in grouping.items()
                ]
                known = all(set(pool.stages) <= set(stage_seconds[pool.slice.name]) for pool in pools)
                if known and all(fits(pool.slice, pool.stages) for pool in pools):
                    split = f"{len(pools)} pools" if len(pools) > 1 else "one pool"
                    kinds_text = str(large) if large == small else f"{large} and {small}"
                    yield Layout(f"{split} on {kinds_text}", tuple(pools))


def _sized(
    layout: Layout, stage_seconds: StageSeconds, terms: Terms, an_hour: float, within_s: float
) -> Estimate | None:
    """Return a layout with the fewest replicas that are busy for no longer than they may be, and fast enough."""
    counts = {
        pool.name: max(1, math.ceil(an_hour * seconds_of(pool, stage_seconds) / HOUR_S / terms.ready / terms.busy))
        for pool in layout.pools
    }
    while True:
        if max(counts.values()) > MOST_REPLICAS:
            return None
        pools = tuple(
            dataclasses.replace(pool, replicas=Replicas(counts[pool.name], counts[pool.name])) for pool in layout.pools
        )
        estimated = estimate(dataclasses.replace(layout, pools=pools), stage_seconds, terms, an_hour)
        longest = max(estimated.pools, key=lambda load: load.wait_s)
        if estimated.to_a_video_s <= within_s or longest.wait_s < 1.0:
            return estimated
        counts[longest.pool.name] += 1
