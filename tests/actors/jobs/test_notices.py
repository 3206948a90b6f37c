"""What processes say of themselves, and whom to tell of a job's end."""

import threading

from sqlalchemy import update

from actors.jobs.deliveries import Deliveries
from actors.jobs.notices import Notices
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.tables import deliveries, notices
from actors.jobs.values import Submission
from actors.jobs.work import WorkQueue
from actors.storage import open_storage


def test_the_latest_word_of_each_process_is_kept(database):
    told = Notices(database)
    told.tell("w1", "worker", "one")
    told.tell("w1", "worker", "two")
    told.tell("i1", "ingress", "three")
    assert [(n.name, n.kind, n.content) for n in told.read()] == [("i1", "ingress", "three"), ("w1", "worker", "two")]
    assert [n.name for n in told.read("worker")] == ["w1"]
    with database.write() as connection:
        connection.execute(update(notices).where(notices.c.name == "w1").values(told_at=database.now(connection) - 100))
    assert [n.name for n in told.read(within_s=60)] == ["i1"]
    told.remove("i1")
    assert told.read(within_s=60) == []


def test_several_may_tell_at_once(database):
    told, failed = Notices(database), []

    def tell(i):
        try:
            for n in range(10):
                told.tell("same", "model", f"{i} {n}")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=tell, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and len(told.read()) == 1


def submit(database, url="https://example.com/hook"):
    return JobStore(database).submit(Submission(owner="ann", request={"prompt": "x"}, webhook_url=url))[0]


def test_an_end_is_told_once_it_is_there_and_to_one_teller_at_a_time(database):
    store, queue, due = JobStore(database), WorkQueue(database), Deliveries(database)
    done, waiting, silent = submit(database), submit(database), submit(database, url=None)
    assert due.claim() is None
    lease = queue.claim("w")
    assert lease.job.id == done.id
    queue.announce(lease, ["a"])
    queue.complete(lease, {"video": "a"})
    store.cancel(silent.id)
    delivery = due.claim()
    assert (delivery.job.id, delivery.job.status, delivery.attempts) == (done.id, "completed", 1)
    assert due.claim() is None and due.waiting() == 1
    due.again(delivery, 0.0)
    again = due.claim()
    assert again.attempts == 2
    due.done(again)
    assert due.claim() is None and due.waiting() == 0
    store.cancel(waiting.id)
    assert due.claim().job.error_code == "cancelled"


def test_deliveries_go_with_their_jobs(database, tmp_path):
    store, due = JobStore(database), Deliveries(database)
    deleted, expired = submit(database), submit(database)
    store.cancel(deleted.id)
    store.cancel(expired.id)
    store.delete(deleted.id)
    with database.write() as connection:
        from actors.jobs.tables import jobs

        connection.execute(update(jobs).where(jobs.c.id == expired.id).values(expires_at=0.0))
    Retention(database, open_storage(tmp_path)).sweep()
    assert due.waiting() == 0
    with database.read() as connection:
        assert connection.execute(deliveries.select()).all() == []


def test_recent_jobs_are_those_that_completed_the_latest_first(database):
    store, queue = JobStore(database), WorkQueue(database)
    ids = []
    for _ in range(3):
        submit(database)
        lease = queue.claim("w")
        assert store.running() == 1
        queue.complete(lease, {})
        ids.append(lease.job.id)
    store.cancel(submit(database).id)
    assert [job.id for job in store.recent(2)] == ids[:0:-1]
    assert store.running() == 0


def test_positions_of_many_are_those_of_each(database):
    store = JobStore(database)
    for i in range(12):
        store.submit(Submission(owner=f"o{i % 3}", request={"n": i}, priority=i % 2))
    WorkQueue(database).claim("w")
    page = store.list(limit=20).jobs
    found = store.positions([job.id for job in page])
    assert found == {job.id: store.position(job) for job in page if job.status == "queued"}
    assert sorted(found.values()) == list(range(11)) and store.positions([]) == {}
