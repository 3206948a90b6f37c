"""A file that several jobs need lives as long as any of them, on both databases.

What deletes and expires jobs doesn't know of shares, as an earlier version beside this one doesn't.
"""

import contextlib
import threading

import pytest
from sqlalchemy import func, select, update

from actors.jobs.retention import Retention
from actors.jobs.sharing import FileGone, expire_unshared
from actors.jobs.stored_request import Redo
from actors.jobs.tables import File, FileShare, Job
from wan_tpu.storage.local import LocalStorage

VIDEO = "made.mp4"


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "results")


@pytest.fixture
def retention(database, storage):
    return Retention(database, storage)


@pytest.fixture
def source(store, work, storage):
    """Return a job that has completed."""
    store.submit(Job(owner="ann", request={}))
    claimed = work.claim("w")
    work.announce(claimed, {VIDEO: 1})
    storage.write(VIDEO, b"video")
    return work.complete(claimed, {"video": VIDEO})


def extend(store, **options):
    return store.submit(Job(owner="ann", request={}, input_video=VIDEO, **options), shared=[VIDEO])[0]


def expire(database, job):
    with database.write() as session:
        session.execute(update(Job).where(Job.id == job.id).values(expires_at=0.0))


def sweep(database, retention, storage):
    expire_unshared(database)
    retention.sweep()
    return storage.has(VIDEO)


@pytest.mark.parametrize("first", ["source", "extension"])
@pytest.mark.parametrize("deleted", [True, False])
def test_shared_file_lives_as_long_as_any_job_needs_it(first, deleted, store, database, retention, storage, source):
    jobs = [source, extend(store)]
    store.cancel(jobs[1].id)
    again = extend(store)  # Of three jobs that need it, the last one goes on.
    for job in jobs if first == "source" else jobs[::-1]:
        store.delete(job.id) if deleted else expire(database, job)
        assert sweep(database, retention, storage)
    store.delete(again.id)
    assert not sweep(database, retention, storage)
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(FileShare)) == 0
        assert session.scalar(select(func.count()).select_from(File)) == 0


def test_segments_that_a_failed_job_was_to_share_are_released(store, database, retention, storage, source):
    redo = Redo(1, 7, (None, VIDEO), ()).to_stored()
    again, _ = store.submit(Job(owner="ann", request={"next_prompts": ["on"], "redo": redo}), shared=[VIDEO])
    store.delete(source.id)
    assert sweep(database, retention, storage)
    store.cancel(again.id)
    assert not sweep(database, retention, storage)


def test_file_of_a_deleted_or_expired_job_is_not_shared(store, database, retention, source):
    store.delete(source.id)
    with pytest.raises(FileGone):
        extend(store)
    retention.sweep()
    with pytest.raises(FileGone):
        extend(store)
    assert store.list().jobs == ()


def test_repeated_request_takes_no_second_share(store, database, source):
    jobs = {extend(store, idempotency_key="once").id for _ in range(2)}
    assert len(jobs) == 1
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(FileShare)) == 2  # The source's and the extension's.


def test_deletion_at_the_same_moment_leaves_the_file_or_refuses_the_job(store, database, retention, storage, source):
    accepted, start = [], threading.Barrier(3)

    def accept():
        start.wait()
        with contextlib.suppress(FileGone):
            accepted.append(extend(store))

    def delete():
        start.wait()
        store.delete(source.id)

    threads = [threading.Thread(target=work) for work in (accept, accept, delete)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sweep(database, retention, storage) == bool(accepted)
