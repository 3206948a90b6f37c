"""What a stream sends while it waits, and how it ends: fragments that were removed, storage and databases that fail."""

import contextlib
import time

import pytest
from sqlalchemy import delete, text

from actors.api.http import watching as watching_module
from actors.jobs.tables import File, StoredFragment
from actors.jobs.work import WorkQueue
from tests.actors.api.serving import create
from tests.actors.api.test_watching import publish, watching
from tests.waiting import wait_for
from wan_tpu.media.boxes import FREE, make_box
from wan_tpu.storage.opening import open_storage

PARTS = [make_box(b"mdat", bytes([number]) * 50_000) for number in range(4)]


@pytest.fixture
def claim(http, database):
    """Return a function that creates a job and claims it."""

    def create_and_claim():
        job, queue = create(http).json()["id"], WorkQueue(database)
        claimed = queue.claim("w")
        assert claimed.id == job
        return queue, claimed

    return create_and_claim


def complete(queue, settings, claimed, *, watchable, content=b"the whole file"):
    name = f"{claimed.id}.whole.mp4"
    queue.announce(claimed, {name: 1})
    open_storage(settings.storage).write(name, content)
    queue.complete(claimed, {"video": name}, watchable=watchable)


def remove(settings, database, name, *, row=True):
    """Remove a fragment as a sweep does, or only its file, as one that is under way has."""
    open_storage(settings.storage).delete(name)
    if row:
        with database.write() as session:
            for table in (StoredFragment, File):
                session.execute(delete(table).where(table.name == name))


def receives(viewer, parts):
    wait_for(lambda: viewer.received == b"".join(parts))
    return True


@pytest.mark.parametrize("row", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["row", "file"])
def test_late_viewer_whose_first_fragment_was_removed_waits_for_the_file(http, settings, database, claim, row):
    queue, claimed = claim()
    names = [publish(queue, settings, claimed, number, PARTS[number]) for number in range(3)]
    with watching(http, claimed.id) as (_, early):
        assert receives(early, PARTS[:3])
        remove(settings, database, names[0], row=row)
        with watching(http, claimed.id) as (_, late):
            publish(queue, settings, claimed, 3, PARTS[3])
            assert receives(early, PARTS)
            time.sleep(0.4)
            assert late.received == b""
            complete(queue, settings, claimed, watchable=True)
            assert late.end() == (b"the whole file", False)
            assert early.end() == (b"".join(PARTS), False)


def test_viewer_goes_on_in_the_run_that_stores_again_what_was_removed(http, settings, database, claim):
    queue, claimed = claim()
    names = [publish(queue, settings, claimed, number, PARTS[number]) for number in range(3)]
    with watching(http, claimed.id) as (_, early):
        assert receives(early, PARTS[:3])
        for name in names[:2]:
            remove(settings, database, name)
        with watching(http, claimed.id) as (_, late):
            queue.release(claimed)
            again = queue.claim("another")
            for number, part in enumerate(PARTS):
                publish(queue, settings, again, number, part)
                wait_for(lambda number=number: late.received == b"".join(PARTS[: number + 1]))
            complete(queue, settings, again, watchable=True)
            assert early.end() == late.end() == (b"".join(PARTS), False)


def test_stream_that_lacks_a_fragment_at_the_end_is_cut(http, settings, database, claim):
    queue, claimed = claim()
    publish(queue, settings, claimed, 0, PARTS[0])
    with watching(http, claimed.id) as (_, viewer):
        assert receives(viewer, PARTS[:1])
        for number in (2, 3):  # The one before them was removed.
            publish(queue, settings, claimed, number, PARTS[number])
        complete(queue, settings, claimed, watchable=True)
        assert viewer.end() == (PARTS[0], True)


@contextlib.contextmanager
def missing(database, table):
    """Rename a table until the block ends, so that queries of it fail."""
    for old, new in ((table, "away"), ("away", table)):
        with database.write() as session:
            session.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))
        if old == table:
            yield


@pytest.mark.parametrize("table", ["fragments", pytest.param("jobs", marks=pytest.mark.thorough)])
def test_stream_is_kept_alive_while_the_database_fails(http, settings, database, claim, monkeypatch, table):
    monkeypatch.setattr(watching_module, "_SILENCE_S", 0.05)
    queue, claimed = claim()
    with watching(http, claimed.id) as (_, viewer):
        publish(queue, settings, claimed, 0, PARTS[0])
        wait_for(lambda: PARTS[0] + FREE in viewer.received)
        publish(queue, settings, claimed, 1, PARTS[1])
        with missing(database, table):
            time.sleep(0.3)
            sent = viewer.received.count(FREE)
            wait_for(lambda: viewer.received.count(FREE) > sent + 3)
        wait_for(lambda: viewer.received.replace(FREE, b"").endswith(PARTS[0] + PARTS[1]))
        http.post(f"/v1/videos/{claimed.id}/cancel").raise_for_status()
        queue.fail(claimed, "invalid", "")
        assert viewer.end()[1]
