"""Workers that claim at the same moment, and a database that refuses or loses an answer."""

import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.exc import OperationalError

from actors.jobs.database import Database
from actors.jobs.errors import CommitUncertain, StoreFailed, StoreUnavailable
from actors.jobs.keys import KeyLimits, list_keys, make_key
from actors.jobs.tables import Job
from actors.jobs.work import WorkQueue
from tests.actors.jobs.submitting import ask

NUL = "a cat\0, a pie"


def test_text_that_postgresql_cannot_look_into_does_not_stop_the_queue(store, work):
    """PostgreSQL stores such JSON, but then every query that reads a field of requests fails, for any job."""
    store.submit(Job(owner="ann", request={"prompt": NUL, "model": "m"}, model="m"))
    ask(store, name="next", model="m")
    assert work.claim("w", model="m").request["prompt"] == NUL
    assert work.claim("w", model="m").request["prompt"] == "next"


def test_results_and_reasons_that_no_database_can_hold_are_recorded_without_the_odd_characters(store, work):
    for name in ("made", "failed"):
        ask(store, name=name)
    work.keep_last_segment(claimed := work.claim("w"), {}, ["cut: \0\ud800"])
    work.fail(failed := work.claim("w"), "invalid", "NUL \0 and \udfff")
    assert (store.get(claimed.id).warnings, store.get(failed.id).error_message) == (["cut: ?"], "NUL  and ?")


def test_refused_statement_is_told_without_what_was_to_be_stored(database, store):
    prompt = "-".join(("hidden", "words"))  # Not written literally, since a traceback quotes this file.
    first = ask(store, name=prompt)
    with pytest.raises(StoreFailed, match="INSERT INTO jobs") as refused:
        store.submit(Job(id=first.id, owner="ann", request={"prompt": prompt}))
    assert prompt not in "".join(traceback.format_exception(refused.value))


def test_lost_answer_to_a_commit_is_told_apart_from_a_change_that_was_never_made(database, store, monkeypatch):
    """Nothing that may be committed must be undone, so the error has to say so."""
    failing = OperationalError("COMMIT", {}, Exception("server closed the connection"))

    def commit_and_lose_the_answer(engine, connection):
        committed(connection)
        raise failing

    dialect = database._engine.dialect
    committed = dialect.do_commit
    monkeypatch.setattr(dialect, "do_commit", lambda connection: commit_and_lose_the_answer(dialect, connection))
    job = Job(owner="ann", request={"prompt": "made"})
    with pytest.raises(CommitUncertain):
        store.submit(job)
    monkeypatch.undo()
    assert store.get(job.id).request == {"prompt": "made"}
    with pytest.raises(StoreUnavailable) as before:
        with database.write():
            raise failing
    assert not isinstance(before.value, CommitUncertain)


def test_limit_of_running_jobs_holds_for_workers_that_claim_at_the_same_moment(address, database, store):
    make_key(database, "ann", KeyLimits(running=1))
    [key] = list_keys(database)
    for i in range(8):
        ask(store, owner=key.id, name=str(i))
    databases = [Database(address) for _ in range(4)]
    ready = threading.Barrier(len(databases))

    def claim(opened):
        ready.wait()
        return WorkQueue(opened).claim("w")

    with ThreadPoolExecutor(len(databases)) as workers:
        for _ in range(5):
            claimed_jobs = [job for job in workers.map(claim, databases) if job is not None]
            assert len(claimed_jobs) == 1
            WorkQueue(database).release(claimed_jobs[0])
    for opened in databases:
        opened.close()


def test_workers_that_come_to_two_full_keys_in_different_orders_don_t_wait_for_each_other(database, store, work):
    owners = []
    for name in ("ann", "bob"):
        make_key(database, name, KeyLimits(running=1))
        owners.append(next(key.id for key in list_keys(database) if key.name == name))
        ask(store, owners[-1])
        assert work.claim("w").owner == owners[-1]
    if not database.postgresql:
        return  # SQLite has one writer at a time.
    met = threading.Barrier(2)

    def look(first, second):
        with database.write() as session:
            assert not work._may_run(session, first)
            met.wait(10)  # Each has looked at its first key, and its transaction goes on.
            assert not work._may_run(session, second)

    with ThreadPoolExecutor(2) as pool:
        for looked in [pool.submit(look, *owners), pool.submit(look, *reversed(owners))]:
            looked.result(timeout=20)
