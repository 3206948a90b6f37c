"""Several worker processes on one database, undisturbed and killed."""

import collections
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.jobs.store import JobStore, open_database
from actors.jobs.tables import Job

JOBS, KILLS = 30, 2
PATIENCE_S = 120
ROOT = Path(__file__).parents[3]


class Crew:
    """Worker processes with a folder for their records."""

    def __init__(self, address, folder):
        self._address, self._folder = address, folder
        self._running = []

    def hire(self, count=1, lease_s=600.0):
        """Start workers. By default none is slow enough to lose its lease."""
        hired = []
        for _ in range(count):
            arguments = [self._address, f"w{len(self._running)}", str(self._folder), str(lease_s)]
            command = [sys.executable, "-m", "tests.actors.jobs.worker", *arguments]
            hired.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE))
            self._running.append(hired[-1])
        return hired

    def dismiss(self):
        (self._folder / "stop").touch()
        return [worker.wait(PATIENCE_S) for worker in self._running]

    def kill(self):
        for worker in self._running:
            worker.kill()
            worker.wait()
            worker.stdout.close()

    def list_done(self):
        return [line for file in self._folder.glob("*.done") for line in file.read_text().split()]


@pytest.fixture
def crew(address, tmp_path):
    (tmp_path / "notes").mkdir()
    hired = Crew(address, tmp_path / "notes")
    yield hired
    hired.kill()


def submit(store, count):
    return {store.submit(Job(owner=f"owner{n % 3}", request={"n": n}))[0].id for n in range(count)}


def wait_until_done(store):
    give_up = time.monotonic() + PATIENCE_S
    while (counts := store.count_jobs().by_status)["queued"] + counts["in_progress"]:
        assert time.monotonic() < give_up, counts
        time.sleep(0.05)
    return counts


def all_jobs(store):
    page = store.list(limit=100)
    jobs = [*page.jobs]
    while page.has_more:
        page = store.list(limit=100, after=jobs[-1].id)
        jobs += page.jobs
    return jobs


@pytest.mark.long
def test_killed_workers_lose_no_job(crew, database):
    store = JobStore(database)
    ids = set()
    for _ in range(KILLS):
        (worker,) = crew.hire(lease_s=1.0)
        worker.stdout.readline()
        ids |= submit(store, JOBS // KILLS)
        worker.kill()  # Whatever it is doing.
    crew.hire(2, lease_s=1.0)
    assert wait_until_done(store)["completed"] == JOBS
    crew.dismiss()
    noted = collections.Counter(crew.list_done())
    assert max(noted.values()) == 1
    assert len(ids - set(noted)) <= KILLS  # Killed between their commit and their note; nobody else has done these.
    jobs = all_jobs(store)
    assert {job.id for job in jobs} == ids
    assert all(job.results == {"video": f"{job.id}/{job.attempts}"} for job in jobs)


def test_many_processes_may_bring_one_database_to_the_schema(empty_address):
    code = "import sys; from actors.jobs.store import open_database; open_database(sys.argv[1])"
    started = [subprocess.Popen([sys.executable, "-c", code, empty_address], cwd=ROOT) for _ in range(2)]
    assert [process.wait(PATIENCE_S) for process in started] == [0] * 2
    opened = open_database(empty_address)
    assert JobStore(opened).list().jobs == ()
    opened.close()
