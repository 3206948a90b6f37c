"""Jobs as OpenTelemetry traces: one span for the attempt, and one for each stage in it. Off by default."""

import os
from collections.abc import Mapping
from typing import Any

from actors.jobs.tables import Job
from wan_tpu.errors import InvalidInput

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own variable for the address of a collector.


class Traces:
    def __init__(self, provider: Any) -> None:
        """Export through an `opentelemetry.sdk.trace.TracerProvider`."""
        self._provider = provider
        self._tracer = provider.get_tracer("wan-tpu")

    @classmethod
    def from_environment(cls) -> "Traces | None":
        """Return an exporter to OTEL_EXPORTER_OTLP_ENDPOINT, or None if it isn't set; raises `InvalidInput`."""
        if not os.environ.get(ENDPOINT):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise InvalidInput(f'{ENDPOINT} is set; traces need their packages: pip install ".[traces]"') from None
        provider = TracerProvider(resource=Resource.create({"service.name": "wan-tpu"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def export(self, job: Job, stages: Mapping[str, tuple[float, float, float]], start_s: float, end_s: float) -> None:
        """Export the attempt that ended a job.

        Args:
            stages: When each stage began and ended, and the seconds that it computed, by stage.
        """
        request = job.request
        root = self._tracer.start_span(
            "video",
            start_time=_to_ns(start_s),
            attributes={
                "job": job.id,
                "status": job.status,
                "error": job.error_code or "",
                "attempt": job.attempts,
                "size": f"{request['width']}x{request['height']}x{request['frames']}",
                "steps": request["steps"],
            },
        )
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(root)
        for stage, (first_s, last_s, computed_s) in stages.items():
            span = self._tracer.start_span(
                stage, context=inside, start_time=_to_ns(first_s), attributes={"computed_s": computed_s}
            )
            span.end(end_time=_to_ns(last_s))
        root.end(end_time=_to_ns(end_s))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)
