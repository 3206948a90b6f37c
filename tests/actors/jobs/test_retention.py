"""Rows and files are removed together, even around crashes."""

import time

import pytest
from sqlalchemy import select, update

from actors.jobs import retention
from actors.jobs.ending import expire_files
from actors.jobs.errors import JobError, JobNotFound
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.tables import File, Job
from actors.jobs.values import JobSettings
from actors.jobs.work import WorkQueue
from actors.reliability import ReliabilitySettings
from wan_tpu.storage.local import LocalStorage
from wan_tpu.storage.opening import open_storage

ALWAYS = JobSettings()
AT_ONCE = JobSettings(ended_s=0.0, abandoned_s=0.0)
HOUR = 3600.0


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path / "results")


def list_recorded_files(database):
    with database.read() as session:
        return set(session.scalars(select(File.name)))


def make_finished_job(database, storage, retention=ALWAYS):
    """Return a completed job with an input, a video, and an announced file that isn't a result."""
    Retention(database, storage, ALWAYS).reserve("inputs/a.png", "", 1)
    storage.write("inputs/a.png", b"image")
    JobStore(database).submit(Job(owner="ann", request={}, input_image="inputs/a.png"))
    work = WorkQueue(database, retention)
    leased = work.claim("w")
    work.announce(leased, dict.fromkeys(["a/1/video.mp4", "a/1/draft.mp4"], 1))
    for name in ("a/1/video.mp4", "a/1/draft.mp4"):
        storage.write(name, b"video")
    return work.complete(leased, {"video": "a/1/video.mp4"})


def test_files_that_are_no_results_are_removed_and_the_rest_stays(database, storage):
    job = make_finished_job(database, storage, JobSettings(abandoned_s=0.0))
    assert Retention(database, storage).sweep() == (0, 1)
    assert set(storage.list()) == list_recorded_files(database) == {"inputs/a.png", "a/1/video.mp4"}
    assert JobStore(database).get(job.id).status == "completed"


def test_files_that_a_waiting_job_needs_stay_though_an_earlier_version_lets_them_expire(database, storage):
    """It takes the job of a lost worker back, and doesn't know all of the files."""
    retention, store, work = Retention(database, storage), JobStore(database), WorkQueue(database)
    retention.reserve("look", "", 1)
    request = {"next_prompts": ["on"], "continue_by": "motion", "reference_files": ["look"]}
    job, _ = store.submit(Job(owner="ann", request=request))
    leased = work.claim("w")
    work.announce(leased, dict.fromkeys(["first", "end", "fragment"], 1))
    work.keep_segment(leased, 0, "first", "end", results={"end-1": "end"})
    work.release(leased)

    def list_pending():
        with database.read() as session:
            return set(session.scalars(select(File.name).where(File.delete_at.is_not(None))))

    with database.write() as session:
        expire_files(session, job.id, time.time() + HOUR)
    assert list_pending() == {"look", "first", "end", "fragment"}
    retention.sweep()
    assert list_pending() == {"fragment"}
    store.cancel(job.id)
    retention.sweep()
    assert list_pending() == {"first", "end", "fragment"}


@pytest.mark.parametrize("is_deleted", [False, True], ids=["expired", "deleted"])
def test_a_job_that_goes_takes_all_its_files(is_deleted, database, storage):
    job = make_finished_job(database, storage, ALWAYS if is_deleted else AT_ONCE)
    if is_deleted:  # A crash after that leaves files, but the list of them too.
        JobStore(database).delete(job.id)
    assert Retention(database, storage).sweep() == (not is_deleted, 3)
    with pytest.raises(JobNotFound):
        JobStore(database).get(job.id)
    assert storage.list() == {} and list_recorded_files(database) == set()
    assert Retention(database, storage).sweep() == (0, 0)


def test_a_released_upload_is_gone_unless_a_job_has_it(database, storage):
    retention, store = Retention(database, storage), JobStore(database)
    for name in ("inputs/free.png", "inputs/taken.png"):
        retention.reserve(name, "", 1)
        storage.write(name, b"image")
    store.submit(Job(owner="ann", request={}, input_image="inputs/taken.png"))
    assert retention.release("inputs/free.png") and not retention.release("inputs/taken.png")
    assert not retention.release("inputs/unknown.png")
    assert set(storage.list()) == list_recorded_files(database) == {"inputs/taken.png"}


def test_no_job_gets_an_upload_that_is_being_released(database, storage, tmp_path):
    """Its file can't be removed yet, but is due from then on."""
    retention = Retention(database, storage)
    retention.reserve("inputs/b.png", "", 1)
    (tmp_path / "results" / "inputs/b.png").mkdir(parents=True)  # Not a file: even root can't unlink it.
    assert not retention.release("inputs/b.png")
    with pytest.raises(JobError):
        JobStore(database).submit(Job(owner="ann", request={}, input_image="inputs/b.png"))


def test_files_of_a_lost_worker_are_removed_but_not_the_next_one_s(database, storage):
    JobStore(database).submit(Job(owner="ann", request={}))
    lost = WorkQueue(database, AT_ONCE, ReliabilitySettings(lease_s=0.05))
    late = lost.claim("late")
    lost.announce(late, {"a/1/video.mp4": 1})
    time.sleep(0.1)
    lost.requeue_lost()
    work = WorkQueue(database)
    leased = work.claim("next")
    work.announce(leased, {"a/2/video.mp4": 1})
    storage.write("a/1/video.mp4", b"half")
    storage.write("a/2/video.mp4", b"video")
    assert Retention(database, storage).sweep() == (0, 1)
    assert set(storage.list()) == {"a/2/video.mp4"}
    assert work.complete(leased, {"video": "a/2/video.mp4"}).status == "completed"
    assert Retention(database, storage).sweep() == (0, 0)


def test_a_file_that_can_t_be_removed_holds_up_no_other(database, storage, tmp_path):
    job = make_finished_job(database, storage)
    (tmp_path / "results" / "a/1/video.mp4").unlink()
    (tmp_path / "results" / "a/1/video.mp4").mkdir()  # Not a file: even root can't unlink it.
    JobStore(database).delete(job.id)
    assert Retention(database, storage).sweep() == (0, 2)
    assert list_recorded_files(database) == {"a/1/video.mp4"}  # It isn't forgotten.
    assert Retention(database, storage).sweep() == (0, 0)  # It is tried again later.


class SlowStorage(LocalStorage):
    """Calls `meanwhile` while a file is being removed."""

    def delete(self, name):
        self.meanwhile(name)
        super().delete(name)


@pytest.mark.parametrize("later", [None, HOUR])
def test_file_that_is_needed_again_while_others_are_removed_stays(database, tmp_path, later):
    storage = SlowStorage(tmp_path / "results")
    names = {f"inputs/{number}.png" for number in range(3)}
    for name in names:
        Retention(database, storage, AT_ONCE).reserve(name, "", 1)
        storage.write(name, b"image")

    def need_the_others(name):
        with database.write() as session:
            delete_at = None if later is None else database.now(session) + later
            session.execute(update(File).where(File.name.in_(names - {name})).values(delete_at=delete_at))

    storage.meanwhile = need_the_others
    assert Retention(database, storage).sweep() == (0, 1)
    assert len(storage.list()) == 2 and set(storage.list()) == list_recorded_files(database)


def test_sweep_removes_more_jobs_than_one_transaction_takes(database, storage, monkeypatch):
    monkeypatch.setattr(retention, "_BATCH", 10)
    store, work = JobStore(database), WorkQueue(database, AT_ONCE)
    for _ in range(15):
        store.submit(Job(owner="ann", request={}))
    while leased := work.claim("w"):
        work.complete(leased, {})
    assert Retention(database, storage).sweep() == (15, 0)
    assert store.list().jobs == ()
