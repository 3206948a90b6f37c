"""Metrics for operators, published through Ray: each node's agent exposes those of its processes to Prometheus.

On KubeRay that is port 8080 of every pod, from which the objects of `wan-tpu manifests` collect them; their names begin
with "ray_" there. The service's own figures are at its `/metrics`.
"""

import contextlib
import functools
import logging
import math
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

from ray.util.metrics import Counter, Gauge

log = logging.getLogger(__name__)

_EVERY_S = 10.0  # Ray's agents pass figures on as often.
# A gauge shows zero for labels that vanish for this long, so that every scraper sees it, and then drops them.
ZERO_S = 120.0

P = ParamSpec("P")


def ignore_errors(method: Callable[P, None]) -> Callable[P, None]:
    """Have a method log what it raises: figures may be lost, but the work that they count goes on."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            log.warning("metrics are lost: %s", method.__qualname__, exc_info=True)

    return call


def is_amount(value: float) -> bool:
    """Return whether a counter may grow by a number; after a clock was set, a duration may be negative or NaN."""
    return math.isfinite(value) and value > 0


class PipelineMeters:
    """The figures that a pipeline's status actor has. No method raises."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start; `clock` returns the seconds by which labels that have vanished are dropped."""
        self._clock = clock
        self._replicas = Gauge("wan_replicas", "Replicas, by what they do.", ("pool", "activity"))
        self._drains = Counter("wan_drains", "Slices that were to be taken away: preempted, drained.", ("pool",))
        self._replicas_gone = Counter("wan_replicas_gone", "Replicas that ended, for whatever reason.", ("pool",))
        self._starts = Counter("wan_starts", "Replicas that are ready.", ("pool",))
        self._start_s = Counter("wan_start_seconds", "What the phases of their starts took.", ("pool", "phase"))
        self._requests = Gauge("wan_requests", "Requests under way.", ("stage",))
        self._ended = Counter("wan_requests_ended", "Requests that ended.", ("outcome",))
        self._shown_s: dict[Gauge, dict[tuple[str, ...], float]] = {}  # When each set of labels last had a count.

    @ignore_errors
    def show(self, replicas: Mapping[tuple[str, ...], int], stages: Mapping[str, int]) -> None:
        """Show how many replicas and requests there are; to be repeated, as Ray forgets a gauge once it was read.

        Args:
            replicas: How many replicas there are, by pool and activity.
        """
        self._show_counts(self._replicas, replicas)
        self._show_counts(self._requests, {(stage,): count for stage, count in stages.items()})

    @ignore_errors
    def count_start(self, pool: str, phases: Mapping[str, float]) -> None:
        """Count a replica that is ready, and the seconds that each phase of its start took."""
        self._starts.inc(tags={"pool": pool})
        for phase, seconds in phases.items():
            if is_amount(seconds):
                self._start_s.inc(seconds, {"pool": pool, "phase": phase})

    @ignore_errors
    def count_drain(self, pool: str) -> None:
        """Count a replica whose slice will be taken away."""
        self._drains.inc(tags={"pool": pool})

    @ignore_errors
    def count_gone(self, pool: str) -> None:
        self._replicas_gone.inc(tags={"pool": pool})

    @ignore_errors
    def count_end(self, outcome: str) -> None:
        self._ended.inc(tags={"outcome": outcome})

    def _show_counts(self, gauge: Gauge, counts: Mapping[tuple[str, ...], int]) -> None:
        """Show counts, and for a while zero for labels that have vanished."""
        now, shown_s = self._clock(), self._shown_s.setdefault(gauge, {})
        shown_s.update(dict.fromkeys(counts, now))
        for values, last_s in list(shown_s.items()):
            if now - last_s > ZERO_S:
                del shown_s[values]
            else:
                gauge.set(counts.get(values, 0), dict(zip(gauge.info["tag_keys"], values, strict=True)))


class BatchMeters:
    """Metrics of a batch's progress and cost. No method raises."""

    def __init__(self, chips: Mapping[str, int], dollars: Mapping[str, float]) -> None:
        """Start; `chips` of each stage's slice, and `dollars` that one of them costs per hour where that is known."""
        self._chips, self._dollars = chips, dollars
        self._lines = Gauge("wan_batch_lines", "Lines of a batch's manifest.", ("status",))
        self._chip_s = Counter("wan_batch_chip_seconds", "Chips compute for a batch.", ("stage",))
        self._spent = Counter("wan_batch_dollars", "What they cost.", ("stage",))

    @ignore_errors
    def show_lines(self, statuses: Mapping[str, int], total: int) -> None:
        """Show how many lines have ended, by status, and how many are left."""
        counts = Counts(statuses)
        for status in ("done", "failed", "invalid", "changed"):
            self._lines.set(counts[status], {"status": status})
        self._lines.set(total - counts.total(), {"status": "left"})

    @ignore_errors
    def count_compute(self, stage: str, seconds: float) -> None:
        """Count the time that a slice has computed for the batch, and its price."""
        used = seconds * self._chips.get(stage, 1)
        if not is_amount(used):
            return
        self._chip_s.inc(used, {"stage": stage})
        if (price := self._dollars.get(stage)) is not None and is_amount(price):
            self._spent.inc(used * price / 3600, {"stage": stage})


class ChipMeters:
    """Metrics of the load and memory of one host's chips, read in a thread while the process lives."""

    def __init__(self, stages: Sequence[str]) -> None:
        """Label the figures with the stages that the host runs."""
        self._stages = "+".join(stages)
        tags = ("stages", "chip")
        self._gauges = {
            "duty_cycle_pct": Gauge("wan_tpu_duty_cycle_percent", "Time in which a chip computed.", tags),
            "hbm_capacity_usage": Gauge("wan_tpu_hbm_used_bytes", "High-bandwidth memory in use.", tags),
            "hbm_capacity_total": Gauge("wan_tpu_hbm_total_bytes", "High-bandwidth memory.", tags),
        }

    def start(self) -> None:
        """Start the thread. Only on hosts with TPUs: elsewhere libtpu searches for one for minutes."""
        from libtpu.sdk import tpumonitoring

        threading.Thread(
            target=self._show_repeatedly, args=(tpumonitoring.get_metric,), name="chips", daemon=True
        ).start()

    def _show_repeatedly(self, metric: Callable[[str], Any]) -> None:
        pause = threading.Event()
        while not pause.wait(_EVERY_S):
            try:
                self.show({name: metric(name).data() for name in self._gauges})
            except Exception as error:  # A host doesn't end for want of figures.
                log.warning("there are no metrics of the chips: %s", error)

    @ignore_errors
    def show(self, figures: Mapping[str, Sequence[str]]) -> None:
        """Show libtpu's values, which are texts in the order of the chips; those that aren't numbers are left out."""
        for name, values in figures.items():
            for chip, value in enumerate(values):
                with contextlib.suppress(ValueError):
                    self._gauges[name].set(float(value), {"stages": self._stages, "chip": str(chip)})
