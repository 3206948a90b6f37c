"""Chains, streams and viewers in a service where everything fails at times."""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from actors.api.worker.held_bytes import HeldBytes
from actors.jobs import ending
from actors.jobs.store import open_database
from actors.jobs.work import WorkQueue
from tests.actors.simulation.chains import simulate_chains
from tests.actors.simulation.scenario import limit_garbage_collection


@pytest.fixture
def simulate():
    """Return a function that runs a seed. The database is in memory, if this machine has a file system there."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    open_database(folder / "empty.sqlite").close()
    yield lambda seed, **options: simulate_chains(seed, folder, folder / "empty.sqlite", **options)
    shutil.rmtree(folder, ignore_errors=True)


def first_failure(simulate, seeds, until_s=float("inf"), **options):
    with limit_garbage_collection() as collect:
        for tried, seed in enumerate(seeds, 1):
            result = simulate(seed, **options)
            if result.problems or time.perf_counter() > until_s:
                return result, tried
            collect()
    return result, tried


# A seed takes 0.1 to 0.3 seconds of processor time, nearly all of it in SQLAlchemy; `make soak` tries new ones.
def test_every_viewer_has_the_file_and_no_segment_is_made_twice(simulate):
    result, _ = first_failure(simulate, range(12))
    assert not result.problems, result.tell()


@pytest.mark.soak
def test_no_new_seed_fails(simulate):
    start, first = time.perf_counter(), int(time.time())
    seconds = float(os.environ.get("WAN_TPU_SIMULATION_S", "60"))
    result, tried = first_failure(simulate, range(first, first + 10**9), start + seconds, jobs=4)
    print(f"{tried} services from seed {first}")
    assert not result.problems, result.tell()


# ---- it can tell


def lets_a_chain_keep_its_place(patch):
    """A job of 30 segments kept its worker's place for all of them."""
    patch.setattr(WorkQueue, "give_way", lambda queue, claimed: False)


def forgets_the_last_segment(patch):
    """A join that failed cost the last segment."""

    def keep_last_segment(queue, claimed, made, warnings=(), frames=None):
        claimed.last_segment = dict(made)

    patch.setattr(WorkQueue, "keep_last_segment", keep_last_segment)


def goes_on_without_a_word(patch):
    """An attempt that couldn't stream didn't abandon an earlier one's fragments."""
    patch.setattr(WorkQueue, "abandon_fragments", lambda queue, claimed: None)


def deletes_what_may_still_be_written(patch):
    """A fragment was written after its video had been deleted, and stayed for ever."""

    def complete(queue, claimed, results, *, unwritten=(), **options):
        return original(queue, claimed, results, **options)

    original = WorkQueue.complete
    patch.setattr(WorkQueue, "complete", complete)


def reads_what_does_not_fit(patch):
    """Jobs that were claimed together held more than a worker may."""

    @contextlib.asynccontextmanager
    async def reserve(held, size):
        with held.hold(size):
            yield

    patch.setattr(HeldBytes, "reserve", reserve)


def keeps_what_it_was_to_share(patch):
    """Segments that a cancelled job was to take from another one stayed after that one's deletion."""
    patch.setattr(ending, "withdraw", lambda session, job, names: None)


DEFECTS = [
    (forgets_the_last_segment, {"faults": 6, "kinds": ("ffmpeg", "stop")}),
    (lets_a_chain_keep_its_place, {"faults": 0, "jobs": 4}),
    (goes_on_without_a_word, {"faults": 0}),
    (deletes_what_may_still_be_written, {"faults": 2, "kinds": ("slow",)}),
    (reads_what_does_not_fit, {"faults": 0, "jobs": 4}),
    (keeps_what_it_was_to_share, {"faults": 0}),
]


@pytest.mark.soak
@pytest.mark.parametrize(("defect", "options"), DEFECTS, ids=[defect.__name__ for defect, _ in DEFECTS])
def test_a_defect_that_is_put_back_is_found(defect, options, simulate, monkeypatch):
    defect(monkeypatch)
    result, tried = first_failure(simulate, range(10**6), **options)
    print(f"found by seed {result.seed}, the {tried}th: {result.problems[0]}")
    assert result.problems
