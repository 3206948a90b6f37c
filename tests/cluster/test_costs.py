"""What layouts make and cost: against a simulation of their queues, by hand, and what is refused."""

import json
import random

import pytest

from actors.planning import plan
from cluster.chips import GIB
from cluster.costs.capacity import CapacityAssumptions, estimate, estimate_wait_s, recommend
from cluster.costs.prices import Prices
from cluster.errors import NoCapacity, PriceError
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from wan_tpu.runtime.memory import MemoryNeed, fits

STAGES, EXPERTS = ("encoder", "high", "low", "decoder"), ("high", "low")
TEXT = """
date: 2026-11-25
chips:
  v6e: {on-demand: {here: 2.0, there: 3.0}, spot: {there: 1.0}}
"""
# Seconds and GiB a device, as they might be: on four chips twice as long, and twice as much.
_STAGES = {"encoder": (0.5, 2), "high": (40, 4), "low": (68, 4), "decoder": (0.5, 1)}
SCALES = {"v6e-4": 2, "v6e-8": 1}
SECONDS = {kind: {stage: s * scale for stage, (s, _) in _STAGES.items()} for kind, scale in SCALES.items()}


def fit(kind, stages):
    parts = [MemoryNeed(_STAGES[stage][1] * SCALES[kind.name] * GIB, 2 * GIB) for stage in stages]
    return fits(parts, kind.chip.device_bytes)


LAYOUT = """
pools:
  encoder-decoder: {stages: [encoder, decoder], slice: v6e-4}
  experts: {stages: [high, low], slice: v6e-8, replicas: {min: 1, max: 2}}
"""


@pytest.fixture(scope="module")
def assumptions(tmp_path_factory):
    path = tmp_path_factory.mktemp("prices") / "prices.yaml"
    path.write_text(TEXT)
    # A hundredth of the day is lost.
    return CapacityAssumptions(Prices.load(path), busy=0.8, cold_start_s=864, starts_a_day=1)


def simulate_mean_wait_s(replicas, seconds, videos_an_hour, count=100_000):
    """Return the mean wait of videos that arrive at random."""
    generator, free, now, waited = random.Random(0), [0.0] * replicas, 0.0, 0.0
    for _ in range(count):
        now += generator.expovariate(videos_an_hour / 3600)
        first = min(range(replicas), key=free.__getitem__)
        start = max(now, free[first])
        free[first] = start + seconds
        waited += start - now
    return waited / count


@pytest.mark.parametrize(("replicas", "busy"), [(1, 0.5), (1, 0.8), (3, 0.8), (10, 0.9)])
def test_waits_are_those_of_a_simulated_queue(replicas, busy):
    seconds = 108.0
    videos_an_hour = busy * replicas * 3600 / seconds
    assert estimate_wait_s(replicas, seconds, videos_an_hour) == pytest.approx(
        simulate_mean_wait_s(replicas, seconds, videos_an_hour), rel=0.1
    )


def test_a_layout_makes_what_its_slowest_pool_makes(assumptions):
    estimated = estimate(Layout.parse(LAYOUT, "mine"), SECONDS, assumptions)
    assert estimated.videos_an_hour == pytest.approx(2 * 3600 / 108 * 0.99)
    assert estimated.chips == 4 + 2 * 8
    assert estimated.dollars_an_hour == pytest.approx(20 * 2.0)
    assert estimated.dollars_a_video == pytest.approx(40 / (0.8 * estimated.videos_an_hour))
    encoder_decoder, experts = estimated.pools
    assert (encoder_decoder.seconds, experts.seconds) == (2.0, 108.0)
    assert experts.busy == pytest.approx(0.8)
    assert estimated.to_a_video_s == pytest.approx(110 + encoder_decoder.wait_s + experts.wait_s)
    spot = estimate(Layout.parse(LAYOUT, "mine"), SECONDS, CapacityAssumptions(assumptions.prices, "spot", busy=0.8))
    assert spot.dollars_an_hour == pytest.approx(20 * 1.0)


def test_the_cheapest_comes_first_and_all_meet_the_demand(assumptions):
    estimates = recommend(SECONDS, STAGES, EXPERTS, assumptions, videos_a_day=5000, within_s=600, fits=fit)
    assert [estimated.dollars_an_hour for estimated in estimates] == sorted(
        estimated.dollars_an_hour for estimated in estimates
    )
    # Four chips have no room for all stages.
    assert len({estimated.name for estimated in estimates}) == len(estimates) == 1 + 1 + 4 + 4
    for estimated in estimates:
        assert estimated.to_a_video_s <= 600
        assert estimated.videos_an_hour * 0.8 >= 5000 / 24
        layout = Layout.parse(estimated.text, "printed")
        layout.check_stages(STAGES)
        again = estimate(layout, SECONDS, assumptions, 5000 / 24)
        assert again.dollars_an_hour == pytest.approx(estimated.dollars_an_hour)


def test_more_slices_are_taken_where_videos_would_wait_too_long(assumptions):
    slow, fast = (recommend(SECONDS, STAGES, EXPERTS, assumptions, 500, within, fits=fit)[0] for within in (1000, 130))
    assert fast.to_a_video_s <= 130 < slow.to_a_video_s
    assert fast.dollars_an_hour > slow.dollars_an_hour


def test_a_demand_that_nothing_meets_is_refused_with_what_comes_nearest(assumptions):
    with pytest.raises(NoCapacity, match=r"\b10 layouts.*\b11\d s\b.*\b60 s"):
        recommend(SECONDS, STAGES, EXPERTS, assumptions, 5000, 60, fits=fit)
    with pytest.raises(NoCapacity, match=r"mine.* 66\.0 .* 70\.0 "):
        estimate(Layout.parse(LAYOUT, "mine"), SECONDS, assumptions, 70)
    with pytest.raises(NoCapacity, match="v6e-1"):
        recommend({"v6e-1": {}}, STAGES, EXPERTS, assumptions, 1, 60, fits=fit)


@pytest.mark.parametrize(
    ("kind", "capacity", "region", "message"),
    [
        ("v5e-8", "spot", None, "v5e.*v6e.*--prices"),
        ("v6e-8", "reserved", None, "reserved.*v6e.*on-demand.*spot"),
        ("v6e-8", "spot", "here", "spot.*v6e.*here"),
    ],
)
def test_a_price_that_is_not_known_is_refused(kind, capacity, region, message, assumptions):
    with pytest.raises(PriceError, match=message):
        assumptions.prices.slice_hour(SliceSpec(kind), capacity, region)


@pytest.mark.parametrize(
    ("text", "message"), [("chips: {}", "date"), (TEXT.replace("2.0", "-2.0"), r"here.*-2\.0"), ("{", "YAML")]
)
def test_a_table_that_is_wrong_is_refused(text, message, tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(PriceError, match=message):
        Prices.load(path)


def test_what_is_printed_can_be_read(assumptions, tmp_path):
    estimates = recommend(SECONDS, STAGES, EXPERTS, assumptions, 5000, 600, fits=fit)
    lines = plan._format_table(estimates).splitlines()[1:]
    assert [line.split()[-1] for line in lines] == [f"{estimated.dollars_a_video:.3f}" for estimated in estimates]
    rows = plan._format_estimate(estimates[0]).splitlines()[2:]
    assert [row.split()[:3] for row in rows] == [
        [load.pool.name, load.pool.slice.name, str(load.replicas)] for load in estimates[0].pools
    ]
    assert json.loads(json.dumps([plan._as_json(estimated) for estimated in estimates]))[0]["pools"][0]["replicas"] >= 1
    plan._draw(estimates, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 10_000
