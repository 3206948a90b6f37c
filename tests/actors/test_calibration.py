"""What the doctor measured in place of published figures: prices move as they should, and what is off is named."""

import dataclasses
import json

import pytest

from actors.commands.doctor import write_bundle
from actors.doctor import clock
from actors.doctor.finding import Machine, merge
from actors.doctor.prediction import MEASURED, PUBLISHED, explain, predict
from actors.planning.calibration import FIGURES, Calibration, load_calibration
from actors.planning.slice_description import describe_slice
from cluster.chips import CHIPS
from cluster.slice_spec import SliceSpec
from tests.wan_tpu.test_aot_cost import CYCLES
from tests.wan_tpu.test_aot_kernel_cost import kernel_config
from wan_tpu.errors import InvalidInput
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.cost import Times
from wan_tpu.pricing.ici import Interconnect
from wan_tpu.pricing.kernel_prices import KernelPrices, StepBundles
from wan_tpu.pricing.probe import count_probe

PUBLISHED_FIGURES = Calibration(chip="v6e")
V6E = CHIPS["v6e"]
HALF = {"clock_hz": V6E.clock_hz / 2, "hbm_bytes_per_s": V6E.hbm_bytes_per_s / 2, "grid_step_s": 5e-3}
HALF |= {"link_bytes_per_s": V6E.ici_link_bytes_per_s / 2}
# A product of 10 ms and a kernel of 6 grid steps and 3.4 ms, a copy of 2.6 ms, and a sum over two chips of
# 5.4 ms. Nothing runs beside anything else.
STEP = f"""
%product_body (a: bf16[16,128], b: bf16[128,256]) -> bf16[16,256] {{
  %a = bf16[16,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %b = bf16[128,256]{{1,0:T(8,128)(2,1)}} parameter(1)
  ROOT %dot = bf16[16,256]{{1,0:T(8,128)(2,1)}} convolution(%a, %b), dim_labels=bf_io->bf
}}

ENTRY %main (a.1: bf16[16,128], b.1: bf16[128,256], x: f32[16,384], y: f32[1024,131072]) -> f32[4096,131072] {{
  %a.1 = bf16[16,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %b.1 = bf16[128,256]{{1,0:T(8,128)(2,1)}} parameter(1)
  %x = f32[16,384]{{1,0}} parameter(2)
  %y = f32[1024,131072]{{1,0}} parameter(3)
  %wide = f32[4096,131072]{{1,0}} parameter(4)
  %product = bf16[16,256]{{1,0:T(8,128)(2,1)}} fusion(%a.1, %b.1), calls=%product_body, {CYCLES.format(17_500_000)}
  %kernel.1 = f32[16,384]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call", backend_config=KERNEL
  %summed = f32[1024,131072]{{1,0}} all-reduce(%y), replica_groups={{{{0,1}}}}, to_apply=%sum
  ROOT %moved = f32[4096,131072]{{1,0}} copy(%wide), {CYCLES.format(4_550_000)}
}}
"""


@pytest.fixture(scope="module")
def text():
    return STEP.replace("KERNEL", kernel_config())


@pytest.fixture
def price(text, tmp_path):
    """What the step costs with some figures: (seconds, seconds by category)."""

    def price(calibration):
        chip = describe_slice(SliceSpec("v6e-8"), calibration)
        kernels = KernelPrices(
            tmp_path, chip.hardware, chip.cores, lambda calls, *_: [StepBundles(1_000_000)] * len(calls)
        )
        links = Interconnect(((0, 0, 0, 0), (1, 0, 0, 0)), chip.link_bytes_per_s, chip.core_bytes_per_s)
        cost = analyse(text, chip.hardware, links, kernel_cycles=kernels)
        return cost.total, cost.by_category()

    return price


def with_figures(**figures):
    return dataclasses.replace(PUBLISHED_FIGURES, **figures)


def test_clock_that_is_a_tenth_slower_makes_what_computes_a_tenth_slower(price):
    _, before = price(PUBLISHED_FIGURES)
    _, after = price(with_figures(clock_hz=0.9 * V6E.clock_hz))
    assert after["matmul"].floor == pytest.approx(before["matmul"].floor / 0.9)
    assert after["vector"].floor == pytest.approx(before["vector"].floor / 0.9)  # The kernel.
    assert after["collectives"].floor == pytest.approx(before["collectives"].floor)
    assert after["copies"].floor == before["copies"].floor


def test_half_the_links_takes_twice_as_long(price):
    _, before = price(PUBLISHED_FIGURES)
    _, after = price(with_figures(link_bytes_per_s=HALF["link_bytes_per_s"]))
    assert after["collectives"].estimate == pytest.approx(2 * before["collectives"].estimate)
    assert after["matmul"] == before["matmul"]


def test_grid_step_counts_once_for_each(price):
    before, _ = price(PUBLISHED_FIGURES)
    after, _ = price(with_figures(grid_step_s=1e-4))
    assert after.estimate - before.estimate == pytest.approx(6 * 1e-4)


def test_half_the_memory_rate_doubles_the_floor_of_what_it_bounds(price):
    _, before = price(PUBLISHED_FIGURES)
    _, after = price(with_figures(hbm_bytes_per_s=HALF["hbm_bytes_per_s"]))
    assert after["copies"].floor == pytest.approx(2 * before["copies"].floor)


@pytest.mark.parametrize("fault", HALF)
def test_part_of_the_chip_that_is_off_is_named(price, fault):
    """The chip has the fault, the doctor has measured all figures, and the step takes what such a chip takes."""
    sound = {"clock_hz": V6E.clock_hz, "hbm_bytes_per_s": V6E.hbm_bytes_per_s, "grid_step_s": 0.0}
    sound |= {"link_bytes_per_s": V6E.ici_link_bytes_per_s}
    measured = with_figures(**sound | {fault: HALF[fault]})
    finding = explain("denoise step", price(measured)[0].floor, variants(price, measured))
    others = [FIGURES[name][0] for name in HALF if name != fault]
    assert finding.verdict == "warn"
    assert f"off: {FIGURES[fault][0]} +" in finding.measured
    assert not [name for name in (*others, "the program") if f"{name} +" in finding.measured]


def test_step_that_no_figure_explains_is_the_programs_fault(price):
    measured = with_figures(clock_hz=V6E.clock_hz)
    finding = explain("denoise step", 1.3 * price(measured)[0].estimate, variants(price, measured))
    assert "off: the program +" in finding.measured
    assert "the program itself is to blame: attach this report" in finding.advice
    fine = explain("denoise step", 1.02 * price(measured)[0].estimate, variants(price, measured))
    assert (fine.verdict, fine.advice) == ("ok", "")


def variants(price, calibration):
    chosen = {PUBLISHED: calibration.only(""), MEASURED: calibration}
    chosen |= {name: calibration.only(name) for name in calibration.figures}
    totals: dict[str, Times] = {name: price(figures)[0] for name, figures in chosen.items()}
    return {name: (total.estimate, total.floor) for name, total in totals.items()}


def test_clock_at_half_speed_is_named_where_it_is_measured(monkeypatch):
    """A chip that runs 262 bundles an iteration and 80 a grid step, each of which takes 0.5 us more, at 0.875 GHz."""

    def time_probe(steps, iterations, *, interpret):
        return 1e-4 + steps * (0.5e-6 + (80 + 262 * iterations) / (V6E.clock_hz / 2))

    monkeypatch.setattr(clock, "time_probe", time_probe)
    monkeypatch.setattr(clock, "count_probe", lambda host: (262.0, 80.0))
    machine = Machine(folder=None, kind="TPU v6 lite", devices=8)
    speed, step = clock.check_clock(machine)
    assert (speed.name, speed.verdict) == ("clock", "warn")
    assert speed.measured == "0.875 GHz, 50% of its peak"
    assert step.measured == "0.50 us beyond its bundles"
    assert machine.calibration.clock_hz == pytest.approx(V6E.clock_hz / 2)
    assert machine.calibration.grid_step_s == pytest.approx(0.5e-6)
    sound = dataclasses.replace(machine, calibration=Calibration(clock_hz=V6E.clock_hz, grid_step_s=0.0))
    assert merge([sound, machine]).calibration == machine.calibration  # A slice is as fast as its slowest host.


@pytest.mark.thorough
@pytest.mark.parametrize("chip", ["v6e", "v5p", "v7x"])
def test_compiler_gives_the_kernel_the_bundles_that_it_is_made_for(chip):
    """64 operations of 16 registers, four a bundle, and 6 bundles of the loop."""
    pytest.importorskip("libtpu", reason="needs libtpu: pip install '.[tpu]'")
    bundles, around = count_probe(CHIPS[chip].host_topology)
    assert bundles == 64 * 16 / 4 + 6
    assert 40 < around < 150


# ---- reports


@pytest.fixture
def report(tmp_path):
    machine = Machine(tmp_path, kind="TPU v6 lite", devices=8)
    machine.calibration = Calibration(clock_hz=1.64e9, grid_step_s=5e-7)
    write_bundle(tmp_path / "doctor.json", machine, [])
    return tmp_path / "doctor.json"


def test_report_says_what_it_replaces(report):
    calibration = load_calibration(report)
    slice_ = describe_slice(SliceSpec("v6e-4"), calibration)
    assert (slice_.hardware.clock_hz, slice_.hardware.grid_step_s) == (1.64e9, 5e-7)
    assert slice_.hardware.peak_flops == pytest.approx(V6E.bf16_flops * 1.64 / 1.75)
    first, *lines = slice_.calibrated.splitlines()
    assert first.startswith(f"measured ({report}, v6e, 20")
    assert lines == [
        "  clock: 1.64 GHz in place of 1.75",
        "  grid step, beyond its bundles: 0.5 us in place of nothing",
        "  as published: device memory, link between chips",
    ]


def test_report_of_another_generation_is_refused(report):
    with pytest.raises(InvalidInput, match=r"v6e.*v5p-8"):
        describe_slice(SliceSpec("v5p-8"), load_calibration(report))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-100], "JSON"),
        (lambda text: "[1]", "report"),
        (lambda text: text.replace('"calibration"', '"other"'), "figures"),
        (lambda text: text.replace("1640000000.0", '"fast"'), "clock_hz.*'fast'"),
        (lambda text: text.replace("1640000000.0", "-1"), r"clock_hz.*-1\b"),
        (lambda text: text.replace("1640000000.0", "NaN"), "clock_hz.*nan"),
        (lambda text: text.replace("grid_step_s", "grid_steps"), "grid_steps.*5e-07"),
        (lambda text: text.replace('"rehearsal": false', '"rehearsal": true'), "nothing"),
        (lambda text: text.replace('"chip": "v6e"', '"chip": ""'), "nothing"),
        (lambda text: json.dumps(json.loads(text) | {"calibration": {}}), "measured"),
    ],
)
def test_report_that_is_of_no_use_is_refused(report, change, message):
    report.write_text(change(report.read_text()))
    with pytest.raises(InvalidInput, match=message):
        load_calibration(report)


def test_report_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInput):
        load_calibration(tmp_path / "none.json")


@pytest.mark.thorough
def test_prediction_is_made_by_a_process_of_its_own(tmp_path):
    pytest.importorskip("libtpu", reason="needs libtpu: pip install '.[tpu]'")
    machine = Machine(tmp_path, kind="TPU v6 lite", devices=4)
    machine.calibration = Calibration(clock_hz=V6E.clock_hz / 2)
    size = {"height": 64, "width": 64, "frames": 5}
    predicted = predict("v6e-4", (2, 1, 2), ["text keys"], machine, model="wan2.1-t2v-1.3b", size=size)
    variants = predicted["text keys"]
    assert set(variants) == {PUBLISHED, "clock_hz", MEASURED}
    assert variants["clock_hz"] == variants[MEASURED]
    assert variants["clock_hz"][0] > 1.2 * variants[PUBLISHED][0]
