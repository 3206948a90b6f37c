"""In a service where everything fails at times, each job ends once, with its video or a reason of its own."""

import os
import time

import pytest

from actors.api.worker.job_files import JobFiles
from actors.jobs.store import open_database
from actors.jobs.work import WorkQueue
from tests.actors.simulation.scenario import limit_garbage_collection
from tests.actors.simulation.service import simulate_service

SEEDS, JOBS = range(2), 12


@pytest.fixture
def simulate(tmp_path):
    open_database(tmp_path / "empty.sqlite").close()
    return lambda seed: simulate_service(seed, tmp_path, tmp_path / "empty.sqlite", JOBS)


def first_failure(simulate, seeds, until_s=float("inf")):
    with limit_garbage_collection() as collect:
        for tried, seed in enumerate(seeds, 1):
            result = simulate(seed)
            if result.problems or time.perf_counter() > until_s:
                return result, tried * JOBS
            collect()
    return result, tried * JOBS


@pytest.mark.long
def test_every_job_ends_once_with_its_video_or_a_reason_of_its_own(simulate):
    result, _ = first_failure(simulate, SEEDS)
    assert not result.problems, result.tell()


@pytest.mark.soak
def test_no_new_seed_fails(simulate):
    start, first = time.perf_counter(), int(time.time())
    seconds = float(os.environ.get("WAN_TPU_SIMULATION_S", "60"))
    result, jobs = first_failure(simulate, range(first, first + 10**9), start + seconds)
    print(f"{jobs} jobs from seed {first}")
    assert not result.problems, result.tell()


# ---- it can tell


def forgets_the_jobs_of_lost_workers(patch):
    """A job whose worker was killed stayed in progress for ever."""
    patch.setattr(WorkQueue, "_requeue_lost", lambda queue, session, now: [])


def writes_what_it_has_not_announced(patch):
    """What a killed worker had written was never found again."""

    async def insist(files, change, *args):
        return None if getattr(change, "__name__", "") == "announce" else await original(files, change, *args)

    original = JobFiles.insist
    patch.setattr(JobFiles, "insist", insist)


@pytest.mark.soak
@pytest.mark.parametrize("defect", [forgets_the_jobs_of_lost_workers, writes_what_it_has_not_announced])
def test_a_defect_that_is_put_back_is_found(defect, simulate, monkeypatch):
    defect(monkeypatch)
    result, _ = first_failure(simulate, range(30))
    assert result.problems, "it went through"
