"""The schema, from the first version to this one, on both databases."""

import json

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from actors.jobs.database import Database
from actors.jobs.errors import StoreError
from actors.jobs.migrate import migrate
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.tables import metadata
from actors.jobs.values import new_id
from actors.jobs.work import WorkQueue
from actors.storage import open_storage


@pytest.fixture
def empty(empty_address):
    opened = Database(empty_address)
    yield opened
    opened.close()


def insert_as_version_1(database, owner, status, results=None, image=None):
    row = {
        "id": new_id(),
        "owner": owner,
        "status": status,
        "request": json.dumps({"prompt": "a cat"}),
        "input_image": image,
        "results": json.dumps(results or {}),
        "ended": 1.0 if status == "completed" else None,
    }
    with database.write() as connection:
        connection.execute(
            text(
                "INSERT INTO jobs (id, owner, status, request, input_image, priority, body_digest, attempts, losses, "
                "results, stage_seconds, chip_seconds, created_at, ended_at) VALUES (:id, :owner, :status, :request, "
                ":input_image, 0, 'd', 0, 0, :results, '{}', 0, 1.0, :ended)"
            ),
            row,
        )
    return row["id"]


def test_jobs_of_the_first_version_live_on(empty, tmp_path):
    migrate(empty, "0001")
    done = insert_as_version_1(empty, "ann", "completed", {"video": "v.mp4", "thumbnail": "t.webp"}, "in.png")
    waiting = [insert_as_version_1(empty, owner, "queued") for owner in ("ann", "ann", "bob")]
    migrate(empty)
    store, storage = JobStore(empty), open_storage(tmp_path / "results")
    assert store.get(done).results == {"video": "v.mp4", "thumbnail": "t.webp"}
    work = WorkQueue(empty)
    assert [work.claim("w").job.id for _ in range(3)] == [waiting[0], waiting[2], waiting[1]]  # owners take turns
    for name in ("v.mp4", "t.webp", "in.png"):
        storage.write(name, b"x")
    store.delete(done)
    assert Retention(empty, storage).sweep() == (0, 3)
    assert storage.list() == {}


def test_migrations_end_where_the_tables_are(empty):
    migrate(empty)
    with empty.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        found = {index["name"] for table in metadata.tables for index in inspect(connection).get_indexes(table)}
    # Alembic doesn't compare indexes over expressions on every database.
    assert {index.name for table in metadata.tables.values() for index in table.indexes} <= found


def test_the_queue_and_the_lists_are_read_from_indexes(database):
    queries = {
        "jobs_queue": "SELECT id FROM jobs WHERE status = 'queued' ORDER BY priority DESC, turn, sequence LIMIT 1",
        "jobs_of_owner": "SELECT * FROM jobs WHERE owner = 'a' AND sequence < 9 ORDER BY sequence DESC LIMIT 21",
        "jobs_idempotency": "SELECT * FROM jobs WHERE owner = 'a' AND idempotency_key = 'k'",
        "jobs_running": "SELECT * FROM jobs WHERE status = 'in_progress' AND lease_expires_at <= 5",
        "jobs_outcomes": "SELECT error_code, status, count(*) FROM jobs GROUP BY error_code, status",
        "jobs_expiry": "SELECT id FROM jobs WHERE expires_at <= 5 LIMIT 100",
        "files_of_job": "SELECT name FROM files WHERE job = 'a'",
        "files_doomed": "SELECT name FROM files WHERE doomed_at <= 5 ORDER BY doomed_at LIMIT 100",
    }
    with database.write() as connection:
        if database.postgresql:  # an empty table is read whole, whatever its indexes
            connection.execute(text("SET LOCAL enable_seqscan = off"))
            connection.execute(text("SET LOCAL enable_bitmapscan = off"))
        for index, query in queries.items():
            explain = "EXPLAIN " if database.postgresql else "EXPLAIN QUERY PLAN "
            plan = "\n".join(str(row) for row in connection.execute(text(explain + query)))
            assert index in plan, plan
            assert "sort" not in plan.lower(), plan
            assert "TEMP B-TREE" not in plan, plan


def test_migrating_twice_changes_nothing(empty):
    migrate(empty)
    migrate(empty)
    assert JobStore(empty).list().jobs == ()


def test_a_migration_that_fails_leaves_the_schema_as_it_was(empty):
    migrate(empty, "0001")
    with empty.write() as connection:
        connection.execute(text("CREATE TABLE files (oops INTEGER)"))  # in the way of the second step
    with pytest.raises(Exception, match="files"):
        migrate(empty)
    with empty.read() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == "0001"
        assert "turn" not in {column["name"] for column in inspect(connection).get_columns("jobs")}


def test_the_schema_of_a_newer_program_is_refused(empty):
    migrate(empty)
    with empty.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"schema 9999.*knows up to 0003"):
        migrate(empty)
