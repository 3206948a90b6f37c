"""What the database knows of fragments, on both databases."""

import dataclasses

import pytest
from sqlalchemy import func, select

from actors.jobs.errors import LeaseLost
from actors.jobs.retention import Retention
from actors.jobs.tables import File, StoredFragment
from actors.jobs.values import JobSettings
from actors.jobs.watching import Watched, begin_to_watch, list_fragments, look_at_watched
from actors.jobs.work import WorkQueue
from tests.actors.jobs.submitting import ask
from wan_tpu.storage.opening import open_storage


def publish(work, leased, run, number):
    """Announce and show a fragment of a claimed job; return its name."""
    name = f"{leased.id}.{leased.attempts}.{run}-{number}"
    work.announce(leased, [name])
    fragment = StoredFragment(name=name, job=leased.id, attempt=leased.attempts, run=run, number=number, digest="0")
    for _ in range(2):  # As after a commit whose answer was lost.
        work.publish_fragment(leased, fragment)
    return name


def test_worker_learns_with_its_lease_that_somebody_watches(database, store, work):
    job = ask(store)
    leased = work.claim("w")
    work.renew_lease(leased)
    assert leased.watched_at is None
    begin_to_watch(database, job.id)
    work.renew_lease(leased)
    first = leased.watched_at
    assert first is not None
    begin_to_watch(database, job.id)
    assert store.get(job.id).watched_at == first
    work.release(leased)
    assert work.claim("another").watched_at == first


def test_fragments_of_the_latest_run_are_listed_in_order(database, store, work):
    job = ask(store)
    leased = work.claim("w")
    names = [publish(work, leased, run, number) for run, number in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert [fragment.name for fragment in list_fragments(database, job.id)] == names[2:]
    assert look_at_watched(database, [job.id, "none"]) == {
        job.id: Watched(status="in_progress", attempts=1, fragments=4)
    }
    work.release(leased)
    again = work.claim("w")
    assert [fragment.name for fragment in list_fragments(database, job.id)] == names[2:]
    name = publish(work, again, 0, 0)
    assert [fragment.name for fragment in list_fragments(database, job.id)] == [name]
    with pytest.raises(LeaseLost):
        publish(work, leased, 0, 2)


@pytest.mark.parametrize("watchable", [True, False])
def test_completed_job_says_whether_its_fragments_are_whole(database, store, work, watchable):
    leased = work.claim("w") if ask(store) else None
    publish(work, leased, 0, 0)
    work.complete(leased, {}, watchable=watchable)
    seen = look_at_watched(database, [leased.id])[leased.id]
    assert seen.has_ended and seen.fragments == (1 if watchable else None)


def test_abandoned_fragments_are_no_longer_shown(database, store, work):
    ask(store)
    leased = work.claim("w")
    publish(work, leased, 0, 0)
    work.abandon_fragments(leased)
    assert look_at_watched(database, [leased.id])[leased.id].fragments is None


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
