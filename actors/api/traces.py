"""A job as an OpenTelemetry trace: one span for the attempt, one for each stage in it. Off unless it is asked for."""

import os
from typing import Any

from actors.jobs.values import Job
from actors.timeline import Span
from wan_tpu.errors import InvalidInput

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own variable: where a collector listens


class Traces:
    """Tells what jobs have been through."""

    def __init__(self, provider: Any) -> None:
        """provider: an `opentelemetry.sdk.trace.TracerProvider`."""
        self._provider = provider
        self._tracer = provider.get_tracer("wan-tpu")

    @classmethod
    def from_environment(cls) -> "Traces | None":
        """Return where OTEL_EXPORTER_OTLP_ENDPOINT says, None without it; raises `InvalidInput`."""
        if not os.environ.get(ENDPOINT):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise InvalidInput(
                f'{ENDPOINT} is set; traces need their packages: pip install "wan-tpu[traces]"'
            ) from None
        provider = TracerProvider(resource=Resource.create({"service.name": "wan-tpu"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def tell(self, job: Job, stages: "Stages", start_s: float, end_s: float) -> None:
        """Tell of an attempt that ended the job; times as `time.time()`."""
        asked = job.request
        root = self._tracer.start_span(
            "video",
            start_time=_ns(start_s),
            attributes={
                "job": job.id,
                "status": job.status,
                "error": job.error_code or "",
                "attempt": job.attempts,
                "size": f"{asked['width']}x{asked['height']}x{asked['frames']}",
                "steps": asked["steps"],
            },
        )
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(root)
        for stage, (first_s, last_s, computed_s) in stages.times.items():
            span = self._tracer.start_span(
                stage, context=inside, start_time=_ns(first_s), attributes={"computed_s": computed_s}
            )
            span.end(end_time=_ns(last_s))
        root.end(end_time=_ns(end_s))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class Stages:
    """When the stages of one attempt began and ended, by the slices' clocks, and the seconds they computed."""

    def __init__(self) -> None:
        self.times: dict[str, tuple[float, float, float]] = {}

    def note(self, span: Span) -> None:
        """Take in what a slice has done."""
        first, last, computed = self.times.get(span.stage, (span.start_s, span.end_s, 0.0))
        computed += span.seconds if span.what == "compute" else 0.0
        self.times[span.stage] = (min(first, span.start_s), max(last, span.end_s), computed)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
