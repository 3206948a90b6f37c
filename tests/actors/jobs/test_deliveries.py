"""Deliveries of webhooks, and queries over many jobs."""

from sqlalchemy import event, select, update

from actors.jobs import deliveries
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.tables import Delivery, Job
from actors.jobs.work import WorkQueue
from wan_tpu.storage.opening import open_storage


def submit(database, url="https://example.com/hook"):
    return JobStore(database).submit(Job(owner="ann", request={"prompt": "x"}), webhook_url=url)[0]


def test_a_webhook_is_due_once_its_job_has_ended_and_claimed_by_one_process_at_a_time(database):
    store, queue = JobStore(database), WorkQueue(database)
    done, waiting, silent = submit(database), submit(database), submit(database, url=None)
    assert deliveries.claim(database) is None
    leased = queue.claim("w")
    assert leased.id == done.id
    queue.announce(leased, {"a": 1})
    queue.complete(leased, {"video": "a"})
    store.cancel(silent.id)
    delivery = deliveries.claim(database)
    assert (delivery.job.id, delivery.job.status, delivery.attempts) == (done.id, "completed", 1)
    assert deliveries.claim(database) is None and deliveries.count_waiting(database) == 1
    deliveries.postpone(database, delivery, 0.0)
    again = deliveries.claim(database)
    assert again.attempts == 2
    deliveries.remove(database, again)
    assert deliveries.claim(database) is None and deliveries.count_waiting(database) == 0
    store.cancel(waiting.id)
    assert deliveries.claim(database).job.error_code == "cancelled"


def test_deliveries_go_with_their_jobs(database, tmp_path):
    store = JobStore(database)
    deleted, expired = submit(database), submit(database)
    store.cancel(deleted.id)
    store.cancel(expired.id)
    store.delete(deleted.id)
    with database.write() as session:
        session.execute(update(Job).where(Job.id == expired.id).values(expires_at=0.0))
    Retention(database, open_storage(tmp_path)).sweep()
    with database.read() as session:
        assert session.scalars(select(Delivery.job_id)).all() == [deleted.id]
    delivery = deliveries.claim(database)
    assert (delivery.job.id, delivery.job.status) == (deleted.id, "failed")  # Its webhook is called all the same.


def test_recent_jobs_are_those_that_completed_the_latest_first(database):
    store, queue = JobStore(database), WorkQueue(database)
    ids = []
    for _ in range(3):
        submit(database)
        leased = queue.claim("w")
        queue.complete(leased, {})
        ids.append(leased.id)
    store.cancel(submit(database).id)
    assert [job.id for job in store.list_recent(2)] == ids[:0:-1]
    loaded = []

    def record_load(job, _):
        loaded.append(job.id)

    event.listen(Job, "load", record_load)  # Estimates read each completed job once.
    try:
        known = {job.id: job for job in store.list_recent(20)}
        assert store.list_recent(20, known) == tuple(known.values())
    finally:
        event.remove(Job, "load", record_load)
    assert len(loaded) == len(known) == 3
