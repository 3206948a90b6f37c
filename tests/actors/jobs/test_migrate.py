"""The schema, on both databases."""

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from actors.jobs.database import Database
from actors.jobs.errors import StoreError
from actors.jobs.keys import list_keys
from actors.jobs.migrations.migrate import migrate
from actors.jobs.store import JobStore
from actors.jobs.tables import Job, Table


@pytest.fixture
def empty(empty_address):
    opened = Database(empty_address)
    yield opened
    opened.close()


def test_a_new_database_has_the_tables_of_the_program_and_migrating_it_again_changes_nothing(empty):
    migrate(empty)
    migrate(empty)
    assert JobStore(empty).list().jobs == ()
    metadata = Table.metadata
    with empty.read() as session:
        connection = session.connection()
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        names = {index["name"] for table in metadata.tables for index in inspect(connection).get_indexes(table)}
    # Alembic doesn't compare indexes over expressions on every database.
    assert {index.name for table in metadata.tables.values() for index in table.indexes} <= names


def test_the_queue_and_the_lists_are_read_from_indexes(database):
    queries = {
        "jobs_queue": "SELECT id FROM jobs WHERE status = 'queued' ORDER BY priority DESC, round, sequence LIMIT 1",
        "jobs_of_owner": "SELECT * FROM jobs WHERE owner = 'a' AND sequence < 9 ORDER BY sequence DESC LIMIT 21",
        "jobs_idempotency": "SELECT * FROM jobs WHERE owner = 'a' AND idempotency_key = 'k'",
        "jobs_running": "SELECT * FROM jobs WHERE status = 'in_progress' AND lease_expires_at <= 5",
        "jobs_outcomes": "SELECT error_code, status, count(*) FROM jobs GROUP BY error_code, status",
        "jobs_expiry": "SELECT id FROM jobs WHERE expires_at <= 5 LIMIT 100",
        "files_of_job": "SELECT name FROM files WHERE job = 'a'",
        "files_of_owner": "SELECT sum(size) FROM files WHERE owner = 'a'",
        "files_delete": "SELECT name FROM files WHERE delete_at <= 5 ORDER BY delete_at LIMIT 100",
    }
    for i in range(20):  # All of one owner, so that PostgreSQL has a reason to use the index of keys.
        JobStore(database).submit(Job(owner="a", request={}, idempotency_key=str(i)))
    with database.write() as session:
        if database.postgresql:  # A small table is read whole, whatever its indexes.
            session.execute(text("ANALYZE jobs"))
            session.execute(text("SET LOCAL enable_seqscan = off"))
            session.execute(text("SET LOCAL enable_bitmapscan = off"))
        for index, query in queries.items():
            explain = "EXPLAIN " if database.postgresql else "EXPLAIN QUERY PLAN "
            plan = "\n".join(str(row) for row in session.execute(text(explain + query)))
            assert index in plan, plan
            assert "sort" not in plan.lower(), plan
            assert "TEMP B-TREE" not in plan, plan


def test_an_older_database_keeps_its_jobs_and_keys_and_gets_what_is_new(empty):
    schema = Path(__file__).with_name("schema_0001.sql").read_text()
    if empty.postgresql:
        schema = schema.replace("INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT", "BIGSERIAL NOT NULL PRIMARY KEY")
    with empty.write() as session:
        for statement in filter(str.strip, schema.split(";")):
            session.execute(text(statement))
        session.execute(
            text("INSERT INTO api_keys (id, name, secret_hash, created_at) VALUES ('a', 'ann', :hash, 1)"),
            {"hash": "0" * 64},
        )
        session.execute(
            text(
                "INSERT INTO jobs (id, owner, status, request, priority, round, body_digest, attempts, losses, "
                "results, warnings, stage_seconds, chip_seconds, created_at) "
                "VALUES (:id, 'a', 'queued', '{}', 0, 0, '', 0, 0, '{}', '[]', '{}', 0, 1)"
            ),
            {"id": f"video_{'0' * 48}"},
        )
    migrate(empty)
    [job] = JobStore(empty).list("a").jobs
    [key] = list_keys(empty)
    assert (job.dollars, job.deleted_at, key.scopes, key.priority, key.expires_at) == (0.0, None, "make,read", 0, None)
    with empty.read() as session:
        differences = compare_metadata(MigrationContext.configure(session.connection()), Table.metadata)
    # What a new database has as the program's own default an upgraded one has as the column's: the same to a reader.
    assert [change for change in differences if change[0] != "modify_default"] == []


def test_a_migration_that_fails_leaves_the_schema_as_it_was(empty):
    with empty.write() as session:
        session.execute(text("CREATE TABLE files (oops INTEGER)"))  # It conflicts with the second table.
    with pytest.raises(Exception, match="files"):
        migrate(empty)
    with empty.read() as session:
        connection = session.connection()
        assert MigrationContext.configure(connection).get_current_revision() is None
        assert inspect(connection).get_table_names() == ["files"]


def test_the_schema_of_a_newer_program_is_refused(empty):
    migrate(empty)
    with empty.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match="9999"):
        migrate(empty)
