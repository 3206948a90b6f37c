"""The clients' view of jobs, on both databases."""

import contextlib
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import make_url

from actors.jobs.database import Database
from actors.jobs.errors import (
    IdempotencyConflict,
    JobError,
    JobNotFound,
    JobUnfinished,
    QueueFull,
    StoreError,
    StoreUnavailable,
)
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore, open_database
from actors.jobs.tables import Job
from actors.jobs.values import JobSettings, Room
from actors.jobs.work import WorkQueue
from tests.conftest import ROOT
from wan_tpu.storage.opening import open_storage


def ask(owner="ann", prompt="a cat", **options):
    return Job(owner=owner, request={"prompt": prompt}, body_digest=prompt, **options)


def test_submitted_job_is_found_as_it_was_submitted(store, address):
    request = {
        "prompt": "Katze 🐈 \x00 \ud800",
        "size": "1280x720",
        "steps": 4,
        "shift": 5.0,
        "nested": {"a": [None, True]},
    }
    job, new = store.submit(Job(owner="ann", request=request, priority=3, deadline=2e9, idempotency_key="k"))
    assert new
    assert job.status == "queued"
    assert (job.request, job.priority, job.deadline, job.attempts) == (request, 3, 2e9, 0)
    assert store.get(job.id) == store.get(job.id, "ann") == job
    other = open_database(address)  # Another process's view.
    assert JobStore(other).get(job.id) == job
    other.close()


def test_a_job_of_another_owner_is_not_there(store):
    job, _ = store.submit(ask("ann"))
    for call in (store.get, store.cancel, store.delete):
        with pytest.raises(JobNotFound, match=job.id):
            call(job.id, "bob")
    assert store.list("bob").jobs == ()
    with pytest.raises(JobNotFound):
        store.list("bob", after=job.id)


def test_the_same_key_and_body_is_the_same_job(store):
    job, _ = store.submit(ask(idempotency_key="key"))
    again, new = store.submit(ask(idempotency_key="key"))
    assert not new
    assert again == job
    with pytest.raises(IdempotencyConflict):
        store.submit(ask(prompt="a dog", idempotency_key="key"))
    assert store.submit(ask("bob", idempotency_key="key"))[1]  # Owners have separate idempotency keys.
    assert store.submit(ask())[0].id != store.submit(ask())[0].id  # Without a key there is nothing to compare.


def test_a_key_sent_by_many_threads_at_once_makes_one_job(store):
    results, start = [], threading.Barrier(8)

    def send():
        start.wait()
        results.append(store.submit(ask(idempotency_key="key")))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8
    assert len({job.id for job, _ in results}) == 1
    assert [new for _, new in results].count(True) == 1


def test_a_full_queue_takes_no_more_but_knows_what_it_took(store):
    job, _ = store.submit(ask(idempotency_key="key"), room=Room(queue=1))
    with pytest.raises(QueueFull):
        store.submit(ask(), room=Room(queue=1))
    assert store.submit(ask(idempotency_key="key"), room=Room(queue=1))[0] == job


def test_a_repeated_request_is_told_from_others_without_reading_them(store):
    rows = []
    expected, _ = store.submit(ask(prompt="wanted"))
    for number in range(20):
        store.submit(ask(prompt=str(number)))
    store.submit(ask("bob", prompt="wanted"))

    def record_load(job, _):
        rows.append(job.id)

    event.listen(Job, "load", record_load)
    try:
        assert store.find_repeat("ann", None, "wanted", is_retry=True) == expected
        assert store.find_repeat("ann", None, "unknown", is_retry=True) is None
    finally:
        event.remove(Job, "load", record_load)
    assert rows == [expected.id]
    assert store.find_repeat("ann", None, "wanted") is None


def test_a_repeated_request_gets_no_job_that_ended_badly_and_none_of_a_key(store, database):
    cancelled, deleted, _ = (store.submit(ask())[0] for _ in range(3))
    store.cancel(cancelled.id)
    store.delete(deleted.id)
    running = WorkQueue(database).claim("w")
    store.cancel(running.id)  # It must stop.
    store.submit(ask(idempotency_key="its own"))
    assert store.find_repeat("ann", None, "a cat", is_retry=True) is None


def test_pages_of_long_requests_are_shorter(store, monkeypatch):
    monkeypatch.setattr("actors.jobs.store.PAGE_CHARACTERS", 1000)
    requests = [{"prompt": "ä" * length} for length in (10, 10, 5000, 100, 10)]
    ids = [store.submit(Job(owner="ann", request=request))[0].id for request in requests]
    seen, after = [], None
    while True:
        page = store.list(after=after, order="asc")
        seen.append([job.id for job in page.jobs])
        if not page.has_more:
            break
        after = seen[-1][-1]
    assert seen == [ids[:2], ids[2:3], ids[3:]]


def test_a_commit_in_doubt_is_looked_for_once_it_has_ended(store, database):
    job, entered = ask(), threading.Event()

    def commit():
        with database.write() as session:
            database.serialize(session)
            session.add(job)
            entered.set()
            time.sleep(0.3)

    committing = threading.Thread(target=commit)
    committing.start()
    entered.wait()
    assert store.find_committed(job.id).id == job.id  # Not None, although it began before the commit.
    committing.join()
    assert store.find_committed("video_" + "0" * 48) is None


def test_positions_follow_priority_and_rounds(store, database):
    first, second = store.submit(ask("ann"))[0], store.submit(ask("ann"))[0]
    bobs = store.submit(ask("bob"))[0]
    urgent = store.submit(ask("bob", priority=1))[0]
    order = (urgent, first, bobs, second)
    for at, job in enumerate(order):
        job.position = at
    assert [store.look(job.id, job.owner) for job in order] == list(order)
    WorkQueue(database).claim("w")
    assert [store.look(job.id).position for job in order] == [None, 0, 1, 2]
    assert [job.position for job in store.list(order="asc").jobs] == [0, 2, 1, None]
    with pytest.raises(JobNotFound):
        store.look(first.id, "bob")


def test_a_waiting_job_is_cancelled_at_once(store, database):
    job, _ = store.submit(ask())
    ended = store.cancel(job.id, "ann")
    assert (ended.status, ended.error_code) == ("failed", "cancelled")
    assert ended.expires_at > ended.ended_at
    assert store.cancel(job.id) == ended  # Cancelling again changes nothing.
    assert WorkQueue(database).claim("w") is None


def test_a_job_in_progress_is_not_deleted(store, database):
    job, _ = store.submit(ask())
    leased = WorkQueue(database).claim("w")
    with pytest.raises(JobUnfinished):
        store.delete(job.id)
    WorkQueue(database).fail(leased, "error", "broken")
    store.delete(job.id)
    with pytest.raises(JobNotFound):
        store.get(job.id)


def test_counts_say_what_there_is(store, database):
    work = WorkQueue(database)
    for _ in range(4):
        store.submit(ask())
    work.fail(work.claim("w"), "unhealthy", "NaN")
    work.complete(work.claim("w"), {})
    work.claim("w")
    counts = store.count_jobs()
    assert counts.by_status == {"queued": 1, "in_progress": 1, "completed": 1, "failed": 1}
    assert counts.failures == {"unhealthy": 1}
    assert 0 <= counts.oldest_queued_s < 60
    assert counts.files_pending_deletion == 0


def test_an_input_that_was_not_reserved_in_time_is_refused_with_its_job(store, database, tmp_path):
    Retention(database, open_storage(tmp_path), JobSettings(abandoned_s=30)).reserve("inputs/late.png", "", 1)
    for name in ("inputs/never.png", "inputs/late.png"):
        with pytest.raises(JobError):
            store.submit(ask(input_image=name))
    assert store.list().jobs == ()


def test_a_database_can_be_handed_to_another_process(database):
    assert JobStore(pickle.loads(pickle.dumps(database))).list().jobs == ()


@pytest.mark.parametrize("address", ["", "mysql://root:hunter2@host/jobs", "sqlite://", "postgresql:/x://", "://"])
def test_wrong_address_of_a_database_is_refused_without_showing_a_password(address):
    with pytest.raises(StoreError) as refused:
        Database(address)
    assert "hunter2" not in str(refused.value)


@pytest.fixture
def on_postgres(postgres_server, migrated_postgres):
    database = Database(postgres_server.new_database(like=migrated_postgres))
    yield database
    database.close()


def test_a_database_that_takes_no_changes_for_now_is_away(on_postgres):
    """The old primary is read-only after a failover."""
    store, url = JobStore(on_postgres), make_url(on_postgres._address)
    change = f"SET default_transaction_read_only = off; ALTER DATABASE {url.database} "
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(on_postgres._address, autocommit=True) as operator:
        operator.execute(change + "SET default_transaction_read_only = on")
        on_postgres.close()  # Affects new connections.
        with pytest.raises(StoreUnavailable):
            store.submit(ask())
        operator.execute(change + "RESET default_transaction_read_only")
    store.submit(ask())


def test_process_that_stops_in_a_transaction_holds_up_nobody_for_long(on_postgres):
    """A node lost power while it submitted a job: its connection stays open and silent."""
    code = "import sys, time; from actors.jobs.database import Database; database = Database(sys.argv[1])\n"
    code += (
        "with database.write() as session:\n database.serialize(session); print('locked', flush=True); time.sleep(99)"
    )
    # The server ends its transaction sooner than by our own limit, which test_an_address_s_own_limits_win shows.
    brief = f"{on_postgres._address}&options=-c%20idle_in_transaction_session_timeout%3D2s"
    command = [sys.executable, "-c", code, brief]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as still:
        still.stdout.readline()
        still.send_signal(signal.SIGSTOP)
        try:
            give_up = time.monotonic() + 25
            while True:
                try:
                    JobStore(on_postgres).submit(ask())
                except StoreUnavailable:  # This error must come in time, too.
                    assert time.monotonic() < give_up
                else:
                    break
        finally:
            still.kill()


def test_an_address_s_own_limits_win(on_postgres):
    own = Database(f"{on_postgres._address}&options=-c%20lock_timeout%3D3s")
    for database, limit in ((on_postgres, "15s"), (own, "3s")):
        with database.read() as session:
            assert session.scalar(text("SHOW lock_timeout")) == limit
            assert session.scalar(text("SHOW statement_timeout")) == "30s"
            assert session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "10s"
    own.close()


def test_a_database_whose_connections_are_all_taken_is_away(on_postgres, monkeypatch):
    monkeypatch.setattr(on_postgres._engine.pool, "_timeout", 0.2)
    with contextlib.ExitStack() as connections:
        for _ in range(20):
            connections.enter_context(on_postgres.read())
        with pytest.raises(StoreUnavailable):
            JobStore(on_postgres).list()
