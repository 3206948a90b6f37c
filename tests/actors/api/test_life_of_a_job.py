"""The life of a job: events, cancellation, deadlines, workers that come and go, metrics and logs."""

import contextlib
import dataclasses
import json
import logging
import re
import threading
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from actors.api import estimates
from actors.api.worker import attempt, job_worker
from actors.api.worker.maintenance import remove_orphans
from actors.api.worker.traces import Traces
from actors.errors import PipelineNotFound
from actors.jobs.keys import make_key
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from actors.jobs.work import WorkQueue
from actors.observe.logs import JsonFormatter
from actors.slices.snapshots import Snapshots
from tests.actors.api.serving import change_limits, create, done, served, working
from tests.conftest import PHOTO, ROOT
from tests.waiting import wait_for


def test_events_agree_with_polling(http, worker, engine):
    engine.go.clear()
    job = create(http).json()["id"]
    seen, polled = [], []

    def poll():
        while not polled or polled[-1]["status"] != "completed":
            polled.append(http.get(f"/v1/videos/{job}").json())
            time.sleep(0.05)

    polling = threading.Thread(target=poll)
    polling.start()
    with http.stream("GET", f"/v1/videos/{job}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                seen.append([line.removeprefix("event: ")])
            elif line.startswith("data: "):
                seen[-1].append(json.loads(line.removeprefix("data: ")))
                if seen[-1][1]["step"]:  # It waits there until both have seen it.
                    wait_for(lambda: any(video["step"] for video in polled), "a step")
                    engine.go.set()
    polling.join()
    names, videos = zip(*seen, strict=True)
    assert names[-1] == "completed" and set(names[:-1]) == {"progress"}
    percents = [video["progress"] for video in videos]
    assert percents == sorted(percents) and percents[-1] == 100
    assert videos[-1] == polled[-1]
    known = [{**video, "eta_seconds": None, "queue_position": None} for video in polled]
    first = next(video for video in videos if video["step"])
    assert {**first, "eta_seconds": None, "queue_position": None} in known
    assert http.get("/v1/videos/video_nothing/events").status_code == 404


def test_cancelling_stops_the_work(http, worker, engine):
    engine.go.clear()
    running = create(http).json()["id"]
    wait_for(lambda: http.get(f"/v1/videos/{running}").json()["status"] == "in_progress")
    assert http.delete(f"/v1/videos/{running}").status_code == 409
    http.post(f"/v1/videos/{running}/cancel").raise_for_status()
    ended = done(http, running)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "cancelled")
    wait_for(lambda: engine.under_way == 0)
    assert http.post(f"/v1/videos/{running}/cancel").json()["status"] == "failed"
    assert http.delete(f"/v1/videos/{running}").status_code == 200


def test_cancelling_what_waits(http):
    job = create(http).json()["id"]
    assert http.post(f"/v1/videos/{job}/cancel").json()["error"]["code"] == "cancelled"


def test_passed_deadline_stops_a_running_job(http, worker, engine):
    engine.go.clear()
    job = create(http, deadline=time.time() + 1.5).json()["id"]
    assert done(http, job)["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: engine.under_way == 0)


def test_an_urgent_job_is_taken_when_all_places_are_taken(http, settings, engine):
    few = dataclasses.replace(settings, concurrency=2)
    engine.go.clear()
    with working(few, engine):
        normal = [create(http, prompt=f"n{i}", priority=1).json()["id"] for i in range(4)]
        wait_for(lambda: engine.under_way == 2)
        urgent = [create(http, prompt=f"u{i}", priority=5).json()["id"] for i in range(3)]
        wait_for(lambda: engine.under_way == 4)
        time.sleep(1.2)  # Two more looks at the queue.
        # Two beyond its places, and no more; another of the normal ones is not among them.
        assert [request.prompt for request in engine.asked] == ["n0", "n1", "u0", "u1"]
        assert engine.priorities == [1, 1, 5, 5]
        engine.go.set()
        for job in normal + urgent:
            assert done(http, job)["status"] == "completed"
    assert [request.prompt for request in engine.asked][4:] == ["u2", "n2", "n3"]


def test_a_lost_worker_s_job_is_done_by_another(http, settings, database, engine):
    quick = change_limits(settings, lease_s=2.0)
    job = create(http).json()["id"]
    queue = WorkQueue(database, reliability=quick.reliability)
    assert queue.claim("lost").id == job  # This worker is never heard from again.
    with working(quick, engine):
        video = done(http, job)
    assert (video["status"], video["attempts"]) == ("completed", 2)


def test_a_worker_that_leaves_gives_its_jobs_back(http, settings, engine):
    engine.go.clear()
    job = create(http).json()["id"]
    with working(settings, engine):
        wait_for(lambda: http.get(f"/v1/videos/{job}").json()["step"])
    assert http.get(f"/v1/videos/{job}").json()["status"] == "queued"
    engine.go.set()
    with working(settings, engine, name="worker-2"):
        assert done(http, job)["attempts"] == 2


def test_a_pipeline_that_is_away_costs_no_job(http, settings, engine, monkeypatch):
    async def ready():
        asked.append(None)
        if len(asked) in (2, 3):  # After the first job has failed.
            raise engine.failure
        if len(asked) > 3:
            engine.failure = None  # It is back, and claimed no job before that.

    settings = change_limits(settings, pipeline_pause_s=0.1)
    monkeypatch.setattr(job_worker, "_AGAIN_S", 0.1)
    engine.failure, engine.check_ready, asked = PipelineNotFound("there is no pipeline"), ready, []
    job = create(http).json()["id"]
    with working(settings, engine):
        assert done(http, job)["status"] == "completed"
    assert http.get(f"/v1/videos/{job}").json()["attempts"] == 2


def test_an_image_that_can_t_be_read_for_a_while_costs_no_job(http, settings, engine):
    settings = change_limits(settings, pipeline_pause_s=0.1, input_attempts=1)
    video = http.post("/v1/videos", data={"prompt": "a cat"}, files={"input_reference": PHOTO.read_bytes()}).json()
    [image] = Path(settings.storage).rglob("*.png")
    away = image.rename(f"{settings.storage}-away")
    image.mkdir()  # It isn't missing, which would be the job's end, but can't be read.
    with working(settings, engine):
        wait_for(lambda: http.get(f"/v1/videos/{video['id']}").json()["attempts"] > 1)
        image.rmdir()
        away.rename(image)
        assert done(http, video["id"])["status"] == "completed"


def test_metrics_and_readiness_tell_of_the_worker(http, worker):
    for _ in range(2):
        done(http, create(http).json()["id"])
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
    assert http.get("/ready").json() == {"status": "ok", "workers": 1}
    assert http.get("/health").json() == {"status": "ok"}


def test_an_eta_comes_from_the_jobs_before(http, worker, engine, monkeypatch):
    monkeypatch.setattr(estimates, "_LOOK_EVERY_S", 0.1)
    done(http, create(http).json()["id"])
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
    with served(settings) as address, httpx.Client(base_url=address) as http, working(settings, engine):
        http.headers["Authorization"] = f"Bearer {key}"
        job = create(http, prompt="a secret wish").json()["id"]
        done(http, job)
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    life = [line["event"] for line in lines if line.get("job") == job]
    assert life.index("accepted") < life.index("begun") < life.index("completed")
    assert "secret wish" not in str(lines) and key not in str(lines) and key.split("_")[2] not in str(lines)


def test_jobs_that_wait_for_a_compiler_are_counted(http, worker, engine):
    engine.compile_s = 90.0
    video = done(http, create(http).json()["id"])
    assert sum(video["stage_seconds"].values()) < 90  # The job computes this long.
    text = wait_for(lambda: "wan_compile_seconds_count{" in (t := http.get("/metrics").text) and t)
    [family] = [f for f in text_string_to_metric_families(text) if f.name == "wan_compile_seconds"]
    sums = {(s.labels["pool"], s.labels["stage"]): s.value for s in family.samples if s.name.endswith("_sum")}
    assert sums == {("high", "denoise_high"): 90.0}


def test_the_dashboard_asks_for_figures_that_there_are(http, worker, engine):
    """Every name and label in Grafana's queries is in the real /metrics."""
    engine.compile_s = 90.0
    done(http, create(http).json()["id"])
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
            asked = [word for match in re.findall(r"by \(([^)]*)\)", query) for word in match.split(", ")]
            asked += re.findall(r"(\w+)=~", query)
            assert set(asked) <= labels[name] | {"le"}, query


def test_snapshots_of_jobs_that_nobody_goes_on_with_are_removed(http, database, tmp_path):
    waiting, cancelled, deleted = (create(http).json()["id"] for _ in range(3))
    for job in (waiting, cancelled, deleted, "cat"):
        (tmp_path / f"{job}.{'0' * 16}.0010.safetensors").write_bytes(b"x")
    http.post(f"/v1/videos/{cancelled}/cancel")
    http.delete(f"/v1/videos/{deleted}")
    snapshots = Snapshots(str(tmp_path))
    assert remove_orphans(JobStore(database), snapshots) == 2
    assert snapshots.list_stems() == ["cat", waiting]


def test_a_job_is_a_trace_when_that_is_wanted(http, settings, engine):
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason='traces need their packages ("wan-tpu[traces]")')
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    assert Traces.from_environment() is None
    kept, provider = InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with working(settings, engine, traces=Traces(provider)):
        job = create(http).json()["id"]
        done(http, job)
        spans = wait_for(lambda: len(finished := kept.get_finished_spans()) == 5 and finished)
    *stages, root = spans
    assert (root.name, root.attributes["job"], root.attributes["status"]) == ("video", job, "completed")
    assert [span.name for span in stages] == ["encoder", "denoise_high", "denoise_low", "decoder"]
    assert {span.parent.span_id for span in stages} == {root.context.span_id}
    assert stages[1].attributes["computed_s"] == pytest.approx(0.5, abs=0.05)


@contextlib.contextmanager
def unwritable(settings):
    """Make the results' folder read-only until the block ends."""
    place = Path(settings.storage)
    aside = place.rename(place.with_name("aside")) if place.exists() else None
    place.write_text("no folder")
    yield
    place.unlink()
    if aside:
        aside.rename(place)


def test_a_result_that_can_t_be_stored_for_a_while_costs_no_job(http, settings, engine, monkeypatch, caplog):
    """A finished video isn't made again, and nothing else is begun that couldn't be stored either."""
    for name in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(attempt, name, 0.1)
    engine.go.clear()
    jobs = [create(http).json()["id"]]
    with working(dataclasses.replace(settings, concurrency=1), engine):
        wait_for(lambda: http.get(f"/v1/videos/{jobs[0]}").json()["step"])
        with unwritable(settings):
            engine.go.set()
            jobs += [create(http, prompt=str(i)).json()["id"] for i in range(2)]
            wait_for(lambda: caplog.text.count("not stored yet") > 12)  # More often than a read is tried.
            statuses = [http.get(f"/v1/videos/{job}").json()["status"] for job in jobs]
            assert (statuses, len(engine.asked)) == (["in_progress", "queued", "queued"], 1)
        for job in jobs:
            assert done(http, job)["status"] == "completed"
    assert len(engine.asked) == 3


def test_nothing_is_begun_while_results_have_no_place(http, settings, engine, caplog):
    job = create(http).json()["id"]
    with unwritable(settings), working(settings, engine):
        wait_for(lambda: caplog.text.count("no claim") > 1)
        assert not engine.asked
    with working(settings, engine):
        assert done(http, job)["status"] == "completed"


def test_a_job_waits_for_a_worker_of_the_model_that_it_was_accepted_for(http, settings, database, engine):
    job = create(http).json()["id"]
    request = JobStore(database).get(job).request
    with working(dataclasses.replace(settings, model="another"), engine, name="worker-of-another"):
        other, _ = JobStore(database).submit(Job(owner="", request=request | {"model": "another"}))
        wait_for(lambda: JobStore(database).get(other.id).status == "completed")
        assert JobStore(database).get(job).status == "queued"  # It came first, though.
    with working(settings, engine):
        assert done(http, job)["status"] == "completed"


def test_a_slow_storage_costs_no_lease(http, settings, database, engine):
    """As many results as there are threads wait for a disk that hangs for longer than a lease lasts."""
    quick = change_limits(dataclasses.replace(settings, concurrency=40), lease_s=5.0)
    jobs = [create(http).json()["id"] for _ in range(40)]
    engine.go.clear()
    with working(quick, engine) as tools:
        wait_for(lambda: len(engine.asked) == len(jobs))
        with tools.storage._one_at_a_time:  # A write takes this lock first.
            engine.go.set()
            wait_for(lambda: engine.under_way == 0)
            time.sleep(6)
            another = WorkQueue(database, reliability=quick.reliability)
            assert another.requeue_lost() == []
        assert [done(http, job)["attempts"] for job in jobs] == [1] * len(jobs)


@contextlib.contextmanager
def refusing(database, change, when):
    """Make the database reject a change with an unexpected error until the block ends."""
    trigger = f"CREATE TRIGGER odd BEFORE UPDATE OF {change} ON jobs WHEN {when} BEGIN SELECT RAISE(ABORT, 'odd'); END"
    with database.write() as session:
        session.execute(text(trigger))
    yield
    with database.write() as session:
        session.execute(text("DROP TRIGGER odd"))


def test_an_end_that_can_t_be_recorded_is_tried_again(http, settings, database, engine, caplog):
    settings = change_limits(settings, pipeline_pause_s=1.0)
    with refusing(database, "status", "new.status = 'completed'"), working(settings, engine):
        job = create(http).json()["id"]
        wait_for(lambda: http.get(f"/v1/videos/{job}").json()["attempts"] > 1)
    with working(settings, engine):
        assert done(http, job)["status"] == "completed"
    assert http.delete(f"/v1/videos/{job}").status_code == 200
    assert "IntegrityError" in caplog.text


def test_an_end_that_is_always_refused_is_not_tried_without_end(http, settings, database, engine):
    settings = change_limits(settings, pipeline_pause_s=0.1, job_attempts=2)
    with refusing(database, "status", "new.status = 'completed'"), working(settings, engine):
        job = done(http, create(http).json()["id"])
    assert (job["status"], job["attempts"], job["error"]["code"]) == ("failed", 2, "internal_error")


def test_renewal_that_fails_oddly_is_not_the_last(http, settings, database, engine, caplog):
    engine.go.clear()
    quick = change_limits(settings, lease_s=4.0)
    with working(quick, engine):
        job = create(http).json()["id"]
        wait_for(lambda: http.get(f"/v1/videos/{job}").json()["step"])
        with refusing(database, "lease_expires_at", "new.lease_token = old.lease_token"):
            wait_for(lambda: "lease not renewed" in caplog.text)
        time.sleep(5)
        engine.go.set()
        assert done(http, job)["attempts"] == 1
