"""What operators see of jobs: metrics, readiness, logs, traces, and when a job will be done."""

import json
import logging
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.api import estimates
from actors.api.worker.traces import Traces
from actors.jobs.keys import make_key
from actors.observe.logs import JsonFormatter
from tests.actors.api.serving import create, open_client, serve, wait_for_end, working
from tests.conftest import ROOT
from tests.waiting import wait_for


def test_metrics_and_readiness_tell_of_the_worker(http, worker, engine):
    wait_for_end(http, create(http).json()["id"])
    engine.compile_s = 90.0
    video = wait_for_end(http, create(http).json()["id"])
    assert sum(video["stage_seconds"].values()) < 90  # The job computes this long.
    wait_for(lambda: "wan_step_seconds_count" in http.get("/metrics").text)
    text = wait_for(
        lambda: (
            'wan_jobs_ended_total{process="worker-1",status="completed"} 2.0' in (t := http.get("/metrics").text) and t
        )
    )
    families = {family.name: family for family in text_string_to_metric_families(text)}
    steps = sum(s.value for s in families["wan_step_seconds"].samples if s.name.endswith("_count"))
    assert steps == 2 * 4
    jobs = {s.labels["status"]: s.value for s in families["wan_jobs"].samples}
    assert jobs == {"queued": 0, "in_progress": 0, "completed": 2, "failed": 0}
    assert families["wan_chip_seconds"].samples and families["wan_http_seconds"].samples
    compiled = [s for s in families["wan_compile_seconds"].samples if s.name.endswith("_sum")]
    assert {(s.labels["pool"], s.labels["stage"]): s.value for s in compiled} == {("high", "denoise_high"): 90.0}
    assert http.get("/ready").json() == {"status": "ok", "workers": 1}
    assert http.get("/health").json() == {"status": "ok"}


def test_an_eta_comes_from_the_jobs_before(http, worker, engine, monkeypatch):
    monkeypatch.setattr(estimates, "_LOOK_EVERY_S", 0.1)
    wait_for_end(http, create(http).json()["id"])
    engine.go.clear()
    ids = [create(http).json()["id"] for _ in range(8)]
    waiting = wait_for(lambda: (v := http.get(f"/v1/videos/{ids[-1]}").json())["queue_position"] == 3 and v)
    waiting = wait_for(lambda: (a := http.get(f"/v1/videos/{ids[-1]}")).json()["eta_seconds"] and a)
    assert waiting.json()["eta_seconds"] > 0
    assert 500 <= int(waiting.headers["openai-poll-after-ms"]) <= 5000
    engine.go.set()


def test_logs_are_json_without_prompts_or_keys(settings, database, engine, caplog):
    caplog.set_level(logging.INFO, "actors")
    key = make_key(database, "ann")
    with serve(settings) as address, open_client(address) as http, working(settings, engine):
        http.headers["Authorization"] = f"Bearer {key}"
        job = create(http, prompt="a secret wish").json()["id"]
        wait_for_end(http, job)
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    life = [line["event"] for line in lines if line.get("job") == job]
    assert life.index("accepted") < life.index("begun") < life.index("completed")
    assert "secret wish" not in str(lines) and key not in str(lines) and key.split("_")[2] not in str(lines)


def test_the_dashboard_asks_for_figures_that_there_are(http, worker, engine):
    """Every name and label in Grafana's queries is in the real /metrics."""
    engine.compile_s = 90.0
    wait_for_end(http, create(http).json()["id"])
    there = ("wan_jobs_ended_total{", "wan_compile_seconds_count{")
    text = wait_for(lambda: all(name in (t := http.get("/metrics").text) for name in there) and t)
    families = list(text_string_to_metric_families(text))
    labels = {sample.name: set() for family in families for sample in family.samples}
    for family in families:
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    # Of these there are samples only once something has failed or been told.
    labels |= {
        "wan_failures_total": {"code"},
        "wan_webhooks_total": {"outcome"},
        "wan_handoff_seconds_bucket": {"le", "stage"},
    }
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {"wan_failures_total", "wan_compile_seconds", "wan_webhooks_total", "wan_handoff_seconds"} <= declared
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) > 10
    of_ray = (ROOT / "actors" / "observe" / "meters.py").read_text()  # tests/actors/test_meters.py
    for query in queries:
        for name in re.findall(r"\b(?:ray_)?wan_\w+", query):
            if name.startswith("ray_"):
                assert f'"{name.removeprefix("ray_").removesuffix("_total")}"' in of_ray, query
                continue
            assert name in labels, query
            names = [word for match in re.findall(r"by \(([^)]*)\)", query) for word in match.split(", ")]
            names += re.findall(r"(\w+)=~", query)
            assert set(names) <= labels[name] | {"le"}, query


def test_a_job_is_a_trace_when_that_is_wanted(http, settings, engine):
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason='traces need their packages (".[traces]")')
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    assert Traces.from_environment() is None
    exporter, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with working(settings, engine, traces=Traces(provider)):
        job = create(http).json()["id"]
        wait_for_end(http, job)
        spans = wait_for(lambda: len(finished := exporter.get_finished_spans()) == 5 and finished)
    *stages, root = spans
    assert (root.name, root.attributes["job"], root.attributes["status"]) == ("video", job, "completed")
    assert [span.name for span in stages] == ["encoder", "denoise_high", "denoise_low", "decoder"]
    assert {span.parent.span_id for span in stages} == {root.context.span_id}
    assert stages[1].attributes["computed_s"] == pytest.approx(0.5, abs=0.05)
