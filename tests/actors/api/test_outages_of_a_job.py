"""Outages cost no job: of the pipeline, the storage, the database, and of a worker's own renewals."""

import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path

from sqlalchemy import text

from actors.api.worker import job_worker
from actors.errors import PipelineNotFound
from actors.jobs.work import WorkQueue
from tests.actors.api.serving import change_reliability, create, wait_for_end, working
from tests.conftest import PHOTO
from tests.waiting import wait_for


def test_a_pipeline_that_is_away_costs_no_job(http, settings, engine, monkeypatch):
    async def ready():
        calls.append(None)
        if len(calls) in (2, 3):  # After the first job has failed.
            raise engine.failure
        if len(calls) > 3:
            engine.failure = None  # It is back, and claimed no job before that.

    settings = change_reliability(settings, pipeline_pause_s=0.1)
    monkeypatch.setattr(job_worker, "_AGAIN_S", 0.1)
    engine.failure, engine.check_ready, calls = PipelineNotFound("there is no pipeline"), ready, []
    job = create(http).json()["id"]
    with working(settings, engine):
        assert wait_for_end(http, job)["status"] == "completed"
    assert http.get(f"/v1/videos/{job}").json()["attempts"] == 2


def test_an_image_that_can_t_be_read_for_a_while_costs_no_job(http, settings, engine):
    settings = change_reliability(settings, pipeline_pause_s=0.1, input_attempts=1)
    video = http.post("/v1/videos", data={"prompt": "a cat"}, files={"input_reference": PHOTO.read_bytes()}).json()
    [image] = Path(settings.storage).rglob("*.png")
    away = image.rename(f"{settings.storage}-away")
    image.mkdir()  # It isn't missing, which would be the job's end, but can't be read.
    with working(settings, engine):
        wait_for(lambda: http.get(f"/v1/videos/{video['id']}").json()["attempts"] > 1)
        image.rmdir()
        away.rename(image)
        assert wait_for_end(http, video["id"])["status"] == "completed"


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


def test_nothing_is_begun_while_results_have_no_place(http, settings, engine, caplog):
    job = create(http).json()["id"]
    with unwritable(settings), working(settings, engine):
        wait_for(lambda: caplog.text.count("no claim") > 1)
        assert not engine.requests
    with working(settings, engine):
        assert wait_for_end(http, job)["status"] == "completed"


def test_nothing_is_begun_while_temporary_files_have_no_place(http, settings, engine, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(job_worker, "_AGAIN_S", 0.1)
    job = create(http).json()["id"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with working(settings, engine):
        wait_for(lambda: caplog.text.count("no claim") > 2)
        assert http.get(f"/v1/videos/{job}").json()["attempts"] == 0
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert wait_for_end(http, job)["status"] == "completed"
    assert http.get(f"/v1/videos/{job}").json()["attempts"] == 1


def test_a_slow_storage_costs_no_lease(http, settings, database, engine):
    """As many results as there are threads wait for a disk that hangs for longer than a lease lasts."""
    quick = change_reliability(dataclasses.replace(settings, concurrency=12), lease_s=5.0)
    jobs = [create(http, num_frames=1, num_inference_steps=1).json()["id"] for _ in range(12)]
    engine.go.clear()
    with working(quick, engine) as tools:
        wait_for(lambda: len(engine.requests) == len(jobs))
        with tools.storage._one_at_a_time:  # A write takes this lock first.
            engine.go.set()
            wait_for(lambda: engine.under_way == 0)
            time.sleep(6)
            another = WorkQueue(database, reliability=quick.reliability)
            assert another.requeue_lost() == []
        assert [wait_for_end(http, job)["attempts"] for job in jobs] == [1] * len(jobs)


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
    settings = change_reliability(settings, pipeline_pause_s=0.2)
    with working(settings, engine):
        with refusing(database, "status", "new.status = 'completed'"):
            job = create(http).json()["id"]
            wait_for(lambda: http.get(f"/v1/videos/{job}").json()["attempts"] > 1)
        assert wait_for_end(http, job)["status"] == "completed"
    assert http.delete(f"/v1/videos/{job}").status_code == 200
    assert "IntegrityError" in caplog.text


def test_an_end_that_is_always_refused_is_not_tried_without_end(http, settings, database, engine):
    settings = change_reliability(settings, pipeline_pause_s=0.1, job_attempts=2)
    with refusing(database, "status", "new.status = 'completed'"), working(settings, engine):
        job = wait_for_end(http, create(http).json()["id"])
    assert (job["status"], job["attempts"], job["error"]["code"]) == ("failed", 3, "internal_error")
    assert len(engine.requests) == 1  # The video was there after the first attempt, which allows for one more.


def test_renewal_that_fails_oddly_is_not_the_last(http, settings, database, engine, caplog):
    engine.go.clear()
    quick = change_reliability(settings, lease_s=3.0)
    with working(quick, engine):
        job = create(http).json()["id"]
        wait_for(lambda: http.get(f"/v1/videos/{job}").json()["step"])
        with refusing(database, "lease_expires_at", "new.lease_token = old.lease_token"):
            wait_for(lambda: "lease not renewed" in caplog.text)
        time.sleep(3.5)
        engine.go.set()
        assert wait_for_end(http, job)["attempts"] == 1
