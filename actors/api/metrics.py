"""Metrics for Prometheus. Each process writes its own with its check-ins, and any ingress reports them all."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from actors.jobs.tables import CheckIn, Usage
from actors.jobs.values import Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STAGE_S = (0.05, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_STEP_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 6, 8, 12, 20, 40)
_JOB_S = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 3600, 7200)
_HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

disable_created_metrics()  # They would add a series to each counter and histogram, which nobody needs.


class RecentWork(Collector):
    """For how long each slice has computed for this process within the last hour, counted by the minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without work; `clock` returns seconds."""
        self._clock, self._start_s = clock, clock()
        self._busy_s: dict[tuple[str, int], float] = {}  # By slice and minute.
        self._lock = threading.Lock()

    def add(self, slice_: str, seconds: float) -> None:
        """Count work that has just ended."""
        with self._lock:
            key = slice_, int(self._clock() // 60)
            if key not in self._busy_s:  # A new minute: forget those that are an hour old.
                self._busy_s = {key_: busy_s for key_, busy_s in self._busy_s.items() if key_[1] > key[1] - 60}
            self._busy_s[key] = self._busy_s.get(key, 0.0) + seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the seconds by slice, and how many seconds they cover."""
        now = self._clock()
        busy_s: dict[str, float] = {}
        with self._lock:
            for (name, minute), seconds in self._busy_s.items():
                if minute > now // 60 - 60:
                    busy_s[name] = busy_s.get(name, 0.0) + seconds
        yield _make_gauge("wan_slice_busy_seconds", "A slice has computed, within the window.", "slice", busy_s)
        window = GaugeMetricFamily("wan_slice_window_seconds", "The window of wan_slice_busy_seconds.")
        window.add_metric((), min(3600.0, now - self._start_s))
        yield window


class Meters:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, documentation: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
            return Histogram(f"wan_{name}_seconds", documentation, labels, buckets=buckets, registry=registry)

        self.http = histogram("http", "Answers, until their first byte.", ("method", "route", "status"), _HTTP_S)
        self.job_s = histogram("job", "From claim to end.", (), _JOB_S)
        self.stage_s = histogram("stage", "A stage of a job computes.", ("stage",), _STAGE_S)
        self.step_s = histogram("step", "A denoising step.", ("stage",), _STEP_S)
        self.handoff_s = histogram("handoff", "Payloads travel to or from a slice.", ("stage",), _STAGE_S)
        self.compile_s = histogram("compile", "A job waits for a compiler.", ("pool", "stage"), _JOB_S)
        self.jobs = Counter("wan_jobs_ended", "Jobs that ended.", ("status",), registry=registry)
        self.failures = Counter("wan_failures", "Jobs that failed.", ("code",), registry=registry)
        self.chip_s = Counter("wan_chip_seconds", "Chips compute.", ("stage",), registry=registry)
        self.webhooks = Counter("wan_webhooks", "Webhooks called.", ("outcome",), registry=registry)
        self.slices = RecentWork()
        registry.register(self.slices)
        self.under_way = Gauge("wan_worker_jobs", "Jobs that this worker has under way.", registry=registry)

    def format_text(self) -> str:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry).decode()


@dataclasses.dataclass(frozen=True, eq=False)
class ServiceMetrics(Collector):
    """The metrics of all processes of a service and of its database. They name no key; `KeyMetrics` does."""

    processes: Iterable[CheckIn]
    counts: Counts
    webhooks_waiting: int

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family once. Samples are labelled with their process."""
        families: dict[str, Metric] = {}
        kinds: dict[str, int] = {}
        for process in self.processes:
            kinds[process.kind] = kinds.get(process.kind, 0) + 1
            for family in text_string_to_metric_families(process.metrics):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    whole.samples.append(sample._replace(labels=sample.labels | {"process": process.name}))
        yield from families.values()
        yield _make_gauge("wan_processes", "Processes of the service.", "kind", kinds)
        yield _make_gauge("wan_jobs", "Jobs that are kept.", "status", self.counts.by_status)
        yield _make_gauge("wan_failed_jobs", "Failed jobs that are kept.", "code", self.counts.failures)
        for name, documentation, value in (
            ("wan_queue_oldest_seconds", "How long the oldest waiting job has waited.", self.counts.oldest_queued_s),
            ("wan_files_pending_deletion", "Files that are to be deleted.", self.counts.files_pending_deletion),
            ("wan_webhooks_waiting", "Webhooks that are to be called.", self.webhooks_waiting),
        ):
            yield GaugeMetricFamily(name, documentation, value=value)


@dataclasses.dataclass(frozen=True, eq=False)
class KeyMetrics(Collector):
    """Usage by key id. `/metrics` shows it to operators, and to the holder of a key that key's own."""

    usage: Mapping[str, Usage]

    def collect(self) -> Iterator[Metric]:
        for name in ("videos", "failed", "chip_seconds", "dollars"):
            counts = {key: getattr(used, name) for key, used in self.usage.items()}
            yield _add_samples(CounterMetricFamily(f"wan_key_{name}", "Of jobs that ended.", labels=["key"]), counts)


def _make_gauge(name: str, documentation: str, label: str, values: Mapping[Any, float]) -> Metric:
    return _add_samples(GaugeMetricFamily(name, documentation, labels=[label]), values)


def _add_samples(family: Any, values: Mapping[Any, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family
