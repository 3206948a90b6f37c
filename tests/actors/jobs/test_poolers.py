"""Jobs in PostgreSQL behind Debian's PgBouncer, with its defaults."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from actors.jobs.database import Database
from actors.jobs.errors import StoreError, StoreUnavailable
from actors.jobs.store import JobStore, open_database
from actors.jobs.tables import Job
from tests.actors.jobs.test_processes import Crew, submit, wait_until_done

LIMITS = {"lock_timeout": "15s", "statement_timeout": "30s", "idle_in_transaction_session_timeout": "10s"}


@pytest.fixture(scope="module", params=["transaction", pytest.param("session", marks=pytest.mark.thorough)])
def mode(request):
    if shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin") is None:
        pytest.skip("PgBouncer is not installed (Debian: apt-get install pgbouncer)")
    return request.param


@pytest.fixture(scope="module")
def through_pooler(postgres_server, mode):
    with postgres_server.pooler(mode) as through:
        yield through


@pytest.fixture
def direct(postgres_server, migrated_postgres):
    return postgres_server.new_database(like=migrated_postgres)


@pytest.fixture
def pooled(direct, through_pooler):
    return through_pooler(direct)


def read_limits(transaction):
    with transaction as session:
        return {name: session.scalar(text(f"SHOW {name}")) for name in LIMITS}


def test_new_database_behind_a_pooler_is_migrated(postgres_server, through_pooler):
    opened = open_database(through_pooler(postgres_server.new_database()))
    assert JobStore(opened).list().jobs == ()
    opened.close()


def test_workers_behind_a_pooler_do_every_job_once(pooled, tmp_path):
    """Two processes and this one run the same statements, many times, on connections that they share."""
    crew, database = Crew(pooled, tmp_path), Database(pooled)
    store = JobStore(database)
    try:
        for worker in crew.hire(2):
            worker.stdout.readline()
        ids = submit(store, 20)
        assert wait_until_done(store)["completed"] == 20
        assert crew.dismiss() == [0] * 2
        assert sorted(crew.list_done()) == sorted(ids)
    finally:
        crew.kill()
        database.close()


def test_limits_hold_behind_a_pooler_and_stay_with_their_transactions(pooled):
    database = Database(pooled)
    assert read_limits(database.read()) == read_limits(database.write()) == LIMITS
    database.close()
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(pooled, autocommit=True) as other:  # Another program, which may get the same connection.
        assert other.execute("SHOW lock_timeout").fetchone() == ("0",)
        assert other.execute("SHOW default_transaction_isolation").fetchone() == ("read committed",)


def test_isolation_is_the_transaction_s_own_whatever_others_leave_behind(pooled):
    database = Database(pooled)
    store, count = JobStore(database), text("SELECT count(*) FROM jobs")
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(pooled, autocommit=True) as other:  # In transaction pooling this stays with the connection.
        other.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    with database.read() as session:  # It sees one snapshot.
        assert session.scalar(count) == 0
        store.submit(Job(owner="ann", request={}))
        assert session.scalar(count) == 0
    with database.write() as session:  # It sees what others commit, as after waiting for a lock.
        assert session.scalar(count) == 1
        with ThreadPoolExecutor() as threads:
            threads.submit(store.submit, Job(owner="ann", request={})).result()
        assert session.scalar(count) == 2
    database.close()


def test_settings_that_a_pooler_refuses_are_a_wrong_address(pooled):
    with pytest.raises(StoreError, match="options"):
        open_database(f"{pooled}&options=-c%20lock_timeout%3D3s")


def test_a_pooler_that_is_gone_is_away_for_now(pooled, postgres_server, direct, mode):
    with postgres_server.pooler(mode) as through:
        database = Database(through(direct))
        store = JobStore(database)
        store.list()
    with pytest.raises(StoreUnavailable):
        store.list()
    database.close()


def test_statement_pooling_is_refused(postgres_server, direct, mode):
    with postgres_server.pooler("statement") as through, pytest.raises(StoreError, match="pool_mode"):
        open_database(through(direct))
