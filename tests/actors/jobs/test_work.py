"""The workers' view of jobs, on both databases."""

import time

import pytest
from sqlalchemy import delete, event, select, update

from actors.jobs.database import Database
from actors.jobs.errors import LeaseLost
from actors.jobs.tables import ApiKey, File, Job
from actors.jobs.values import Progress
from actors.jobs.work import WorkQueue
from actors.reliability import ReliabilitySettings
from tests.actors.jobs.submitting import ask, claim_all

SHORT = ReliabilitySettings(lease_s=0.05, worker_attempts=3)


def test_a_job_from_claim_to_completion(store, work):
    job = ask(store)
    leased = work.claim("host-1")
    assert leased.id == job.id
    running = store.get(job.id)
    assert (running.status, running.worker, running.attempts) == ("in_progress", "host-1", 1)
    assert running.started_at >= job.created_at
    leased.progress = progress = Progress(stage="denoise_high", step=3, steps=40, percent=12.5)
    for stage, seconds, chips in (("encoder", 2.0, 8), ("denoise_high", 1.5, 16), ("encoder", 1.0, 8)):
        leased.spend(stage, seconds, chips)
    assert work.renew_lease(leased) is None
    assert store.get(job.id).lease_expires_at > leased.lease_expires_at
    assert store.get(job.id).progress == progress
    assert store.get(job.id).stage_seconds == {"encoder": 3.0, "denoise_high": 1.5}
    assert store.get(job.id).chip_seconds == 48.0
    work.announce(leased, dict.fromkeys(["a/1/video.mp4", "a/1/thumbnail.webp"], 1))
    ended = work.complete(leased, {"video": "a/1/video.mp4", "thumbnail": "a/1/thumbnail.webp"})
    assert ended == store.get(job.id)
    assert (ended.status, ended.progress.percent, ended.stage_seconds["encoder"]) == ("completed", 100.0, 3.0)
    assert ended.results == {"video": "a/1/video.mp4", "thumbnail": "a/1/thumbnail.webp"}


def test_only_what_was_announced_can_be_a_result(store, work):
    ask(store)
    leased = work.claim("w")
    with pytest.raises(ValueError, match=r"\bb\b"):
        work.complete(leased, {"video": "b"})
    assert store.get(leased.id).status == "in_progress"


def test_owners_are_served_round_robin_within_a_priority(store, work):
    for number in range(4):
        ask(store, "ann", f"a{number}")
    for number in range(2):
        ask(store, "bob", f"b{number}")
    ask(store, "bob", "urgent", priority=1)
    ask(store, "ann", "any time", priority=-1)
    assert claim_all(work) == ["urgent", "a0", "b0", "a1", "b1", "a2", "a3", "any time"]


def test_only_what_is_more_urgent_is_claimed_when_that_is_asked_for(store, work):
    ask(store, name="as urgent", priority=2)
    assert work.claim("w", above=2) is None
    ask(store, name="urgent", priority=4)
    assert work.claim("w", above=2).request["prompt"] == "urgent"
    assert work.claim("w", above=2) is None
    assert claim_all(work) == ["as urgent"]


def test_a_silent_worker_loses_its_job_to_the_next(store, database, work):
    ask(store)
    late = WorkQueue(database, reliability=SHORT).claim("late")
    time.sleep(0.1)
    leased = work.claim("next")
    assert leased.id == late.id
    assert (leased.attempts, leased.losses) == (2, 1)
    for report in (
        lambda: work.renew_lease(late),
        lambda: work.announce(late, {"late": 1}),
        lambda: work.complete(late, {}),
        lambda: work.fail(late, "error", "late"),
        lambda: work.release(late),
    ):
        with pytest.raises(LeaseLost, match="late"):
            report()
    work.announce(leased, {"a/2/video.mp4": 1})
    work.complete(leased, {"video": "a/2/video.mp4"})
    assert store.get(leased.id).worker == "next"
    with pytest.raises(LeaseLost):
        work.complete(leased, {"video": "a/2/video.mp4"})  # A second time changes nothing.


def test_renewals_dont_read_requests(store, database, work):
    ask(store)
    leased, statements = work.claim("worker"), []
    event.listen(database._engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    work.renew_lease(leased)
    assert statements and not any("request" in statement for statement in statements)


def test_late_renewal_is_in_time_while_nobody_took_the_job(store, database, work):
    ask(store)
    leased = WorkQueue(database, reliability=SHORT).claim("w")
    time.sleep(0.1)
    work.renew_lease(leased)
    assert work.requeue_lost() == []


def test_job_that_kills_every_worker_fails_in_the_end(store, database):
    job = ask(store)
    work = WorkQueue(database, reliability=SHORT)
    for worker in ("one", "two", "three"):
        assert work.claim(worker)
        time.sleep(0.1)
    assert work.claim("four") is None
    ended = store.get(job.id)
    assert (ended.status, ended.error_code) == ("failed", "lost")
    assert "3 workers were lost" in ended.error_message


def test_giving_a_job_back_is_no_loss(store, database):
    job = ask(store)
    work = WorkQueue(database, reliability=ReliabilitySettings(worker_attempts=1))
    for _ in range(3):
        leased = work.claim("w")
        leased.spend("encoder", 7.0, chips=1)
        work.release(leased)
    stored = store.get(job.id)
    assert (stored.status, stored.attempts, stored.losses, stored.chip_seconds) == ("queued", 3, 0, 21.0)
    assert stored.worker is None


@pytest.mark.parametrize("way", ["complete", "fail", "release", "silence"])
def test_a_running_job_that_was_cancelled_ends_as_cancelled(store, database, way):
    job = ask(store)
    work = WorkQueue(database, reliability=SHORT if way == "silence" else ReliabilitySettings())
    leased = work.claim("w")
    work.announce(leased, {"a/1/video.mp4": 1})
    flagged = store.cancel(job.id)
    assert (flagged.status, flagged.stop_code) == ("in_progress", "cancelled")
    assert store.cancel(job.id) == flagged
    if way == "silence":
        time.sleep(0.1)
        assert work.requeue_lost() == [job.id]
    else:
        assert work.renew_lease(leased) == "cancelled"
        arguments = {"complete": [{"video": "a/1/video.mp4"}], "fail": ["error", "broken"], "release": []}[way]
        getattr(work, way)(leased, *arguments)
    ended = store.get(job.id)
    assert (ended.status, ended.error_code, ended.results) == ("failed", "cancelled", {})
    assert store.count_jobs().files_pending_deletion == 1


def test_passed_deadline_ends_waiting_jobs_and_stops_running_ones(store, database, work):
    waiting, running, later = (ask(store, deadline=time.time() + 1e6, priority=priority) for priority in (0, 1, 0))
    leased = work.claim("w")
    assert leased.id == running.id
    assert work.stop_overdue() == []
    with database.write() as session:  # Time passes.
        session.execute(update(Job).where(Job.id != later.id).values(deadline=time.time() - 1))
    assert set(work.stop_overdue()) == {waiting.id, running.id}
    assert work.stop_overdue() == []
    assert store.get(waiting.id).error_code == "deadline_exceeded"
    assert work.renew_lease(leased) == "deadline_exceeded"
    assert work.complete(leased, {}).error_code == "deadline_exceeded"
    assert work.claim("w").id == later.id


def test_a_job_that_is_past_its_deadline_is_not_begun(store, work):
    ask(store, deadline=time.time() - 1)
    assert work.claim("w") is None


def test_job_behind_a_requeued_one_passes_nobody(store, work):
    """Bob's first job is claimed and given back while Ann's wait. His next ones alternate with hers."""
    ask(store, "bob", "b0")
    back = work.claim("w")
    for i in range(13):
        ask(store, "ann", f"a{i}")
    for _ in range(10):
        work.claim("w")
    work.release(back)
    for i in range(1, 4):
        ask(store, "bob", f"b{i}")
    assert claim_all(work) == ["b0", "a10", "b1", "a11", "b2", "a12", "b3"]


def test_a_job_is_made_by_the_model_that_it_was_accepted_for(store, work):
    for model in ("wan", "other", "wan"):
        store.submit(Job(owner="ann", request={"model": model}))
    claimed = [work.claim("w", model="wan") for _ in range(3)]
    assert [job and job.request["model"] for job in claimed] == ["wan", "wan", None]
    assert work.claim("w", model="other").request["model"] == "other"


def chain(name, segments):
    """Return a request of several segments."""
    return {"prompt": name, "next_prompts": [f"{name}{index}" for index in range(1, segments)]}


def make_segment(work, job):
    """Record a segment of a claimed job as stored; return whether the job was given back after it."""
    index = len(job.segments)
    name = f"{job.id}-{job.attempts}-{index}"
    work.announce(job, {name: 1})
    work.keep_segment(job, index, name, None)
    return work.give_way(job)


def take_turns(work, turns):
    """Return the names of the jobs that have the turns of one place; a job of one segment ends after its turn."""
    order, job = [], None
    while len(order) < turns:
        job = job or work.claim("w", model="m")
        order.append(job.request["prompt"])
        if job.segments_left == 1:
            work.fail(job, "cancelled", "")
            job = None
        elif make_segment(work, job):
            job = None
    return order


def test_turns_alternate_though_other_jobs_wait_that_nobody_may_claim(store, database, work):
    with database.write() as session:
        session.add(ApiKey(id="dan", name="dan", secret_hash="0" * 64, running=1))
    ask(store, "dan", "running", model="m")
    work.claim("another")
    ask(store, "dan", "at its limit", model="m")
    ask(store, "eve", "of no worker", model="n")
    store.submit(Job(owner="ann", request=chain("a", 9), model="m"))
    for index in range(3):
        ask(store, "bob", f"b{index}", model="m")
    assert take_turns(work, 9) == ["a", "b0", "a", "b1", "a", "b2", "a", "a", "a"]
    for index in range(3):
        ask(store, "ann", f"a{index}", model="m")
    ask(store, "cem", "c0", model="m")  # Its owner always has one waiting.
    assert take_turns(work, 2) == ["a0", "c0"]
    ask(store, "cem", "c1", model="m")
    assert take_turns(work, 2) == ["a1", "c1"]


def test_segments_left_are_counted_whoever_has_made_them(store, work):
    job, _ = store.submit(Job(owner="ann", request=chain("a", 3)))
    assert store.get(job.id).segments_left == 3
    leased = work.claim("w")
    make_segment(work, leased)
    make_segment(work, leased)
    assert (leased.segments_left, store.get(job.id).segments_left) == (1, 1)
    work.announce(leased, {"last": 1})
    work.keep_last_segment(leased, {"video": "last"}, ["cut"])
    work.release(leased)
    again = work.claim("next")
    assert (again.segments_left, again.last_segment, again.warnings) == (0, {"video": "last"}, ["cut"])
    assert store.count_jobs().files_pending_deletion == 0
    assert work.complete(again, {"video": "last"}).warnings == ["cut"]


def test_nobody_gives_way_to_a_job_that_could_not_run(store, database, work):
    store.submit(Job(owner="ann", request=chain("a", 3), model="m"))
    leased = work.claim("w")
    ask(store, "ann", "own", model="m")
    ask(store, "bob", "less urgent", priority=-1, model="m")
    ask(store, "bob", "another model's", model="n")
    with database.write() as session:
        session.add(ApiKey(id="cem", name="cem", secret_hash="0" * 64, running=0))
    ask(store, "cem", "at its limit", model="m")
    assert not make_segment(work, leased)
    ask(store, "ann", "more urgent", priority=1, model="m")
    assert make_segment(work, leased)


def test_ends_of_segments_stay_when_their_job_gives_way_and_go_when_it_fails(store, database, work):
    store.submit(Job(owner="ann", request=chain("a", 3)))
    leased = work.claim("w")
    work.announce(leased, dict.fromkeys(["first", "end", "preview"], 1))
    work.keep_segment(leased, 0, "first", "end", results={"end-1": "end"})
    work.show_preview(leased, "preview")
    work.release(leased)
    leased = work.claim("w")
    work.announce(leased, dict.fromkeys(["second", "end 2"], 1))
    work.keep_segment(leased, 1, "second", "end 2", results={"end-2": "end 2"})
    work.release(leased)
    with database.read() as session:
        assert session.scalars(select(File).where(File.delete_at.is_not(None))).all() == []
        assert session.get(File, "end") is not None
    leased = work.claim("w")
    assert leased.results == {"end-1": "end", "preview": "preview", "end-2": "end 2"}
    assert work.fail(leased, "invalid", "it can't be made").results == {"preview": "preview"}
    with database.read() as session:
        assert session.scalars(select(File.name).where(File.delete_at.is_(None))).all() == ["preview"]


def test_what_is_not_stored_any_more_is_made_again(store, database, work):
    store.submit(Job(owner="ann", request=chain("a", 3)))
    leased = work.claim("w")
    work.announce(leased, dict.fromkeys(["first", "second", "end", "last"], 1))
    work.keep_segment(leased, 0, "first", None)
    work.keep_segment(leased, 1, "second", "end")
    work.keep_last_segment(leased, {"video": "last"})
    for gone, segments, end, left in (
        ("last", ["first", "second"], "end", 1),
        ("end", ["first", "second"], None, 1),
        ("second", ["first"], None, 2),
    ):
        work.release(leased)
        with database.write() as session:  # As an earlier version lets it expire, and be removed.
            session.execute(delete(File).where(File.name == gone))
        leased = work.claim("w")
        assert (leased.segments, leased.segments_end, leased.segments_left) == (segments, end, left)
        assert leased.last_segment is None


@pytest.mark.parametrize(("gone", "kept"), [("end-2", 1), ("end-1", 2), ("segment-2", 1)])
def test_segment_whose_end_is_not_stored_any_more_is_made_again_if_motion_goes_on_from_it(
    gone, kept, store, database, work
):
    store.submit(Job(owner="ann", request=chain("a", 4) | {"continue_by": "motion"}))
    leased = work.claim("w")
    for index in range(2):
        names = segment, end = f"segment-{index + 1}", f"end-{index + 1}"
        work.announce(leased, dict.fromkeys(names, 1))
        work.keep_segment(leased, index, segment, end, results={end: end})
    work.release(leased)
    with database.write() as session:
        session.execute(delete(File).where(File.name == gone))
    leased = work.claim("w")
    assert (leased.segments, leased.segments_end) == (["segment-1", "segment-2"][:kept], f"end-{kept}")
    assert leased.segments_left == 4 - kept


def test_processes_that_stood_still_may_renew_their_leases_first(store, database, monkeypatch):
    job = ask(store)
    work = WorkQueue(database, reliability=ReliabilitySettings(renewal_s=0.1))
    leased = work.claim("w")
    assert work.requeue_lost() == []
    now, monotonic = Database.now, time.monotonic
    monkeypatch.setattr(Database, "now", lambda self, session: now(self, session) + 60)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 60)
    assert work.requeue_lost() == []
    work.renew_lease(leased)
    time.sleep(0.4)
    assert work.requeue_lost() == []
    monkeypatch.setattr(Database, "now", lambda self, session: now(self, session) + 120)
    assert work.requeue_lost() == []  # The clock was set.
    time.sleep(0.4)
    assert work.requeue_lost() == [job.id]


def test_many_jobs_of_a_later_version_hold_up_no_claim(store, database, work):
    newer = [Job(owner=f"o{index % 7}", request={"prompt": "newer"}) for index in range(600)]
    with database.write() as session:
        session.add_all(newer)
    ask(store, "bob", "b")
    refused = []

    def can_run(job):
        refused.append(job.sequence)
        return job.request["prompt"] != "newer"

    assert work.claim("old", can_run=can_run).request["prompt"] == "b"
    assert len(refused) < 610 and work.claim("old", can_run=can_run) is None and len(refused) < 610
