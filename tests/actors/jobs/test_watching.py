"""What the database knows of fragments, on both databases."""

import dataclasses

import pytest
from sqlalchemy import func, select, update

from actors.jobs.errors import LeaseLost
from actors.jobs.retention import Retention
from actors.jobs.store import make_private_key
from actors.jobs.tables import File, Job, StoredFragment
from actors.jobs.values import JobSettings
from actors.jobs.watching import RENEW_S, Watched, list_fragments, look_at_watched, share
from actors.jobs.work import WorkQueue
from tests.actors.jobs.submitting import ask
from wan_tpu.storage.opening import open_storage


def publish(work, leased, run, number):
    """Announce and show a fragment of a claimed job; return its name."""
    name = f"{leased.id}.{leased.attempts}.{run}-{number}"
    work.announce(leased, {name: 1})
    fragment = StoredFragment(name=name, job=leased.id, attempt=leased.attempts, run=run, number=number, digest="0")
    for _ in range(2):  # As after a commit whose answer was lost.
        work.publish_fragments(leased, [fragment])
    return name


def look(database, *jobs, seen=None):
    """Return jobs as they are, after they were last `seen`."""
    unseen = Watched(status="queued", attempts=0, fragments=None)
    return look_at_watched(database, dict.fromkeys(jobs, unseen) | (seen or {}))


def change(database, statement):
    with database.write() as session:
        session.execute(statement)


def test_fragments_of_the_latest_run_are_listed_in_order(database, store, work):
    job = ask(store)
    leased = work.claim("w")
    names = [publish(work, leased, run, number) for run, number in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert [fragment.name for fragment in list_fragments(database, job.id)] == names[2:]
    [seen] = look(database, job.id, "none").values()
    assert (seen.status, seen.attempts, seen.fragments) == ("in_progress", 1, 4)
    assert (seen.stored.run, seen.stored.rows) == (1, list_fragments(database, job.id))
    work.release(leased)
    again = work.claim("w")
    assert [fragment.name for fragment in list_fragments(database, job.id)] == names[2:]
    name = publish(work, again, 0, 0)
    assert [fragment.name for fragment in list_fragments(database, job.id)] == [name]
    with pytest.raises(LeaseLost):
        publish(work, leased, 0, 2)


def test_fragments_outlive_their_job_s_end_for_a_while_but_not_its_deletion(database, store, tmp_path):
    storage, brief = open_storage(tmp_path / "results"), JobSettings(abandoned_s=0.0)
    for settings, deleted in ((JobSettings(), False), (JobSettings(), True), (brief, False)):
        work = WorkQueue(database, settings)
        ask(store)
        leased = work.claim("w")
        name = publish(work, leased, 0, 0)
        storage.write(name, b"fragment")
        work.complete(leased, {}, watchable=True)
        if deleted:
            store.delete(leased.id)
        Retention(database, storage, settings).sweep()
        remains = settings is not brief and not deleted
        with database.read() as session:
            counts = [
                session.scalar(select(func.count()).select_from(table).where(table.name == name))
                for table in (File, StoredFragment)
            ]
        assert (storage.has(name), counts) == (remains, [int(remains)] * 2), dataclasses.astuple(settings)


def test_only_new_fragments_are_read_until_a_later_run_begins(database, store, work):
    leased = work.claim("w") if ask(store) else None
    for number in range(2):
        publish(work, leased, 0, number)
    seen = look(database, leased.id)
    change(database, update(StoredFragment).values(digest="read again"))
    assert look(database, leased.id, seen=seen)[leased.id] == seen[leased.id]
    publish(work, leased, 0, 2)
    later = look(database, leased.id, seen=seen)[leased.id]
    assert later != seen[leased.id] and later.stored is seen[leased.id].stored
    assert [(row.number, row.digest) for row in later.stored.rows] == [(0, "0"), (1, "0"), (2, "0")]
    names = [publish(work, leased, 1, number) for number in range(2)]
    latest = look(database, leased.id, seen={leased.id: later})[leased.id].stored
    assert [row.name for row in latest.rows] == names and len(later.stored.rows) == 3


def test_jobs_are_kept_watched_until_they_end_and_by_one_ingress_at_a_time(database, store, work):
    jobs = [ask(store).id for _ in range(3)]
    work.fail(work.claim("w"), "invalid", "")
    look(database, *jobs)
    first = [store.get(job).watched_at for job in jobs]
    assert first[0] is None and first[1] == first[2] is not None
    look(database, *jobs)
    assert [store.get(job).watched_at for job in jobs] == first
    for job, age_s in zip(jobs[1:], (RENEW_S + 1, RENEW_S * 0.6), strict=True):
        change(database, update(Job).where(Job.id == job).values(watched_at=first[1] - age_s))
    look(database, jobs[2])
    assert store.get(jobs[2]).watched_at == first[1] - RENEW_S * 0.6
    look(database, *jobs)  # Both at once, since one of them is due.
    assert store.get(jobs[0]).watched_at is None
    assert store.get(jobs[1]).watched_at == store.get(jobs[2]).watched_at >= first[1]


def test_job_that_others_wait_for_is_not_cancelled_with_the_request_that_made_it(database, store):
    for shared in (False, True):
        key = make_private_key()
        job = store.submit(Job(owner="ann", request={}, idempotency_key=key))[0]
        if shared:
            share(database, job)
        assert store.cancel_private(job.id, key) != shared
    keyed = store.submit(Job(owner="ann", request={}, idempotency_key="a client's"))[0]
    share(database, keyed)
    assert store.get(keyed.id).idempotency_key == "a client's"
