"""Figures never stop what they count, and what has vanished isn't shown for ever."""

import pytest
from ray.util.metrics import Counter, Gauge

from actors.observe.meters import ZERO_S, BatchMeters, ChipMeters, PipelineMeters


@pytest.fixture
def recorded_calls(monkeypatch):
    """What Ray is told: name, labels, value."""
    calls = []
    for kind, method in ((Gauge, "set"), (Counter, "inc")):
        original = getattr(kind, method)

        def record(self, value=1.0, tags=None, original=original):
            original(self, value, tags)
            calls.append((self.info["name"], tags, value))

        monkeypatch.setattr(kind, method, record)
    return calls


@pytest.mark.parametrize("seconds", [-3.0, float("nan"), float("inf"), 0.0])
def test_duration_that_a_set_clock_made_is_left_out(seconds, recorded_calls):
    BatchMeters({"decoder": 8}, {"decoder": 2.7}).count_compute("decoder", seconds)
    PipelineMeters().count_start("decoder", {"read": seconds})
    assert [name for name, _, _ in recorded_calls] == ["wan_starts"]


def test_figures_that_cannot_be_counted_are_logged(caplog):
    meters = PipelineMeters()
    meters.count_gone(None)  # Ray's labels are texts
    meters.count_end(7)
    meters.show({("a", None): 1}, {})
    BatchMeters({}, {}).show_lines(["done"], None)
    BatchMeters({"a": None}, {}).count_compute("a", 1.0)
    ChipMeters(("a",)).show({"unknown": ["1"]})
    names = [record.getMessage().rpartition(".")[2] for record in caplog.records]
    assert names == ["count_gone", "count_end", "show", "show_lines", "count_compute", "show"]


def test_chip_without_a_number_does_not_hide_the_others(recorded_calls):
    ChipMeters(("encoder",)).show({"duty_cycle_pct": ["n/a", "99.0"]})
    assert recorded_calls == [("wan_tpu_duty_cycle_percent", {"stages": "encoder", "chip": "1"}, 99.0)]


def test_labels_that_vanish_are_nought_for_a_while_and_then_gone(recorded_calls):
    now = [0.0]
    meters = PipelineMeters(clock=lambda: now[0])

    def show(replicas):
        recorded_calls.clear()
        meters.show(replicas, {})
        return {tuple(tags.values()): value for _, tags, value in recorded_calls}

    assert show({("experts", "idle"): 2}) == {("experts", "idle"): 2}
    now[0] = 1.0
    assert show({("experts", "busy"): 2}) == {("experts", "idle"): 0, ("experts", "busy"): 2}
    now[0] = ZERO_S + 0.5
    assert show({("experts", "busy"): 2}) == {("experts", "busy"): 2}
