"""The life of a job: events, cancellation, deadlines, urgent jobs, workers that come and go."""

import dataclasses
import json
import threading
import time

from sqlalchemy import select

from actors.api.core.following import PROMPTS
from actors.api.worker.maintenance import remove_orphans
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from actors.slices.snapshots import Snapshots
from tests.actors.api.serving import create, wait_for_end, working
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
    assert {"prompt", "next_prompts"} <= polled[-1].keys()
    polled = [{name: video[name] for name in video.keys() - PROMPTS} for video in polled]
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
    ended = wait_for_end(http, running)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "cancelled")
    wait_for(lambda: engine.under_way == 0)
    assert http.post(f"/v1/videos/{running}/cancel").json()["status"] == "failed"
    assert http.delete(f"/v1/videos/{running}").status_code == 200


def test_passed_deadline_stops_a_running_job(http, worker, engine):
    engine.go.clear()
    job = create(http, deadline=time.time() + 1.5).json()["id"]
    assert wait_for_end(http, job)["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: engine.under_way == 0)


def test_an_urgent_job_is_taken_when_all_places_are_taken(http, settings, engine):
    few = dataclasses.replace(settings, concurrency=2)
    engine.go.clear()
    with working(few, engine):
        normal = [create(http, prompt=f"n{i}", priority=1).json()["id"] for i in range(3)]
        wait_for(lambda: engine.under_way == 2)
        urgent = [create(http, prompt=f"u{i}", priority=5).json()["id"] for i in range(3)]
        wait_for(lambda: engine.under_way == 4)
        time.sleep(1.2)  # Two more looks at the queue.
        # Two beyond its places, and no more; another of the normal ones is not among them.
        assert sorted(request.prompt for request in engine.requests) == ["n0", "n1", "u0", "u1"]
        assert engine.priorities == [1, 1, 5, 5]
        engine.go.set()
        for job in normal + urgent:
            assert wait_for_end(http, job)["status"] == "completed"
    later = [request.prompt for request in engine.requests][4:]
    assert later == ["u2", "n2"]


def test_snapshots_of_jobs_that_nobody_goes_on_with_are_removed(http, database, tmp_path):
    waiting, cancelled, deleted = (create(http).json()["id"] for _ in range(3))
    for job in (waiting, cancelled, deleted, "cat"):
        (tmp_path / f"{job}.{'0' * 16}.0010.safetensors").write_bytes(b"x")
    http.post(f"/v1/videos/{cancelled}/cancel")
    http.delete(f"/v1/videos/{deleted}")
    snapshots = Snapshots(str(tmp_path))
    assert remove_orphans(JobStore(database), snapshots) == 2
    assert snapshots.list_stems() == ["cat", waiting]


def test_jobs_of_the_next_version_wait_for_its_worker_and_hold_up_no_other(http, settings, database, engine):
    newer = {"version": 2}, {"camera_path": "orbit"}, {"frames": 2005}, {"cache": "teacache"}
    *ids, other = (create(http).json()["id"] for _ in range(len(newer) + 1))
    with database.write() as session:
        for id_, fields in zip(ids, newer, strict=True):
            job = session.scalars(select(Job).where(Job.id == id_)).one()
            job.request = job.request | fields
    with working(settings, engine) as worker:
        assert wait_for_end(http, other)["status"] == "completed"
        for id_, fields in zip(ids, newer, strict=True):
            waiting = worker.store.get(id_)
            assert (waiting.status, waiting.attempts) == ("queued", 0)
            assert waiting.request.items() >= fields.items()
    assert len(engine.requests) == 1
