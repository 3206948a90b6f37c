"""What is counted, for Prometheus: each process counts for itself and tells it; any ingress answers for all."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from actors.jobs.notices import Notice
from actors.jobs.values import Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROCESSES = ("ingress", "worker")  # kinds of notices that hold figures
FRESH_S = 60.0  # a process that has told nothing for so long isn't there any more
_STAGE_S = (0.05, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_STEP_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 6, 8, 12, 20, 40)
_JOB_S = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 3600, 7200)
_HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Meters:
    """The figures of one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        named = {"registry": registry}
        self.http = Histogram(
            "wan_http_seconds",
            "Answers, until their first byte.",
            ("method", "route", "status"),
            buckets=_HTTP_S,
            **named,  # type: ignore[arg-type]
        )
        self.jobs = Counter("wan_jobs_ended", "Jobs that ended.", ("status",), registry=registry)
        self.failures = Counter("wan_failures", "Jobs that failed.", ("code",), registry=registry)
        self.job_s = Histogram("wan_job_seconds", "From claim to end.", buckets=_JOB_S, registry=registry)
        self.stage_s = Histogram(
            "wan_stage_seconds", "A stage of a job computes.", ("stage",), buckets=_STAGE_S, registry=registry
        )
        self.step_s = Histogram("wan_step_seconds", "A denoising step.", ("stage",), buckets=_STEP_S, registry=registry)
        self.handoff_s = Histogram(
            "wan_handoff_seconds",
            "Payloads travel to or from a slice.",
            ("stage",),
            buckets=_STAGE_S,
            registry=registry,
        )
        self.chip_s = Counter("wan_chip_seconds", "Chips compute.", ("stage",), registry=registry)
        self.compile_s = Histogram(
            "wan_compile_seconds",
            "A replica of a pool compiles a program.",
            ("pool", "program"),
            buckets=_JOB_S,
            registry=registry,
        )
        self.under_way = Gauge("wan_worker_jobs", "Jobs that this worker has under way.", registry=registry)
        self.webhooks = Counter("wan_webhooks", "Webhooks called.", ("outcome",), registry=registry)

    def text(self) -> str:
        """Return them as Prometheus reads them."""
        return generate_latest(self.registry).decode()


@dataclasses.dataclass(frozen=True, eq=False)
class Whole(Collector):
    """All processes of a service, and its database."""

    notices: Iterable[Notice]
    counts: Counts
    webhooks_waiting: int

    def collect(self) -> Iterator[Metric]:
        """Give every family once, its samples with the process they are of."""
        families: dict[str, Metric] = {}
        kinds: dict[str, int] = {}
        for notice in self.notices:
            if notice.kind not in PROCESSES:  # what is known of the model, say
                continue
            kinds[notice.kind] = kinds.get(notice.kind, 0) + 1
            for family in text_string_to_metric_families(notice.content):
                if family.name.endswith("_created"):
                    continue
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    if not sample.name.endswith("_created"):
                        whole.samples.append(sample._replace(labels=sample.labels | {"process": notice.name}))
        yield from families.values()
        yield _gauge("wan_processes", "Processes of the service.", "kind", kinds)
        yield _gauge("wan_jobs", "Jobs that are kept.", "status", self.counts.by_status)
        yield _gauge("wan_failed_jobs", "Failed jobs that are kept.", "code", self.counts.failures)
        for name, about, value in (
            ("wan_queue_oldest_seconds", "How long the oldest waiting job has waited.", self.counts.oldest_queued_s),
            ("wan_doomed_files", "Files that are to be removed.", self.counts.doomed_files),
            ("wan_webhooks_waiting", "Webhooks that are to be called.", self.webhooks_waiting),
        ):
            family = GaugeMetricFamily(name, about)
            family.add_metric([], value)
            yield family

    def text(self) -> bytes:
        """Return it as Prometheus reads it."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)


def _gauge(name: str, about: str, label: str, values: Mapping[Any, int]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
