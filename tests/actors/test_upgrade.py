"""A rolling upgrade: processes of the version before the stored form of jobs last changed work beside today's."""

import io
import os
import subprocess
import sys
import tarfile
import threading
from datetime import datetime, timedelta

import httpx
import pytest
from PIL import Image
from sqlalchemy import update

from actors.jobs.store import JobStore, open_database
from actors.jobs.tables import Job
from tests.actors.api.serving import create, data_url, open_client, wait_for_end
from tests.actors.api.test_watching import count_frames
from tests.conftest import ROOT
from tests.waiting import wait_for

STORED_FORM = ["actors/jobs/stored_request.py", "actors/jobs/tables.py", "actors/jobs/migrations"]
SERIES = timedelta(hours=12)  # Changes that follow each other as soon as this are one change.
FRAMES = 17

pytestmark = pytest.mark.long


def git(*arguments):
    """Return the output of git; skip the test where there is no history, as in an archive or a shallow clone."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"there is no history of the program here ({error})")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Return a folder with the program as it was before the stored form last changed."""
    lines = git("log", "--format=%H %cI", "--", *STORED_FORM).decode().splitlines()
    changes = [(commit, datetime.fromisoformat(time)) for commit, time in map(str.split, lines)]
    first = next(
        commit
        for (commit, time), (_, before) in zip(changes, [*changes[1:], (None, None)], strict=True)
        if before is None or time - before > SERIES
    )
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(git("archive", f"{first}^", "actors", "wan_tpu", "cluster", "tests"))) as tar:
        tar.extractall(folder, filter="data")
    return folder


class Version:
    """A process of the program in a folder."""

    def __init__(self, code, folder):
        command = [sys.executable, "-P", str(ROOT / "tests/actors/one_version.py"), str(folder)]
        environment, pipe = os.environ | {"PYTHONPATH": str(code)}, subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=code, env=environment, text=True, stdin=pipe, stdout=pipe)

    def tell(self, command):
        """Return the answer to a command."""
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"it ended with {self._process.wait()}"
        return answer.strip()

    def kill(self):
        self._process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.communicate(timeout=60)


class Viewer(threading.Thread):
    def __init__(self, address, job):
        super().__init__(daemon=True)
        self._url, self.answer, self.content = f"{address}/v1/videos/{job}/content?stream=1", None, None
        self.start()
        wait_for(lambda: self.answer is not None)

    def run(self):
        with httpx.stream("GET", self._url, timeout=60) as self.answer:
            self.content = self.answer.read()

    def end(self):
        self.join(60)
        return self.content


def make_all_kinds(address, worker):
    """Make a plain video and one of three segments, both watched, and one that continues a video; return the jobs."""
    frames = {}

    def submit(path, count, **fields):
        answer = http.post(path, json={"prompt": "a cat", "seed": 1, "num_frames": FRAMES, **fields})
        frames[job := answer.raise_for_status().json()["id"]] = count
        return job

    with open_client(address) as http:
        plain = submit("/v1/videos", FRAMES)
        chain = submit("/v1/videos", FRAMES + 2 * (FRAMES - 1), next_prompts=["it sits", "it runs"])
        viewers = {job: Viewer(address, job) for job in (plain, chain)}
        worker.tell("go")
        assert wait_for_end(http, plain)["status"] == "completed"
        submit("/v1/videos/extensions", FRAMES + FRAMES - 1, video={"id": plain})
        for job, count in frames.items():
            video = wait_for_end(http, job)
            assert (video["status"], video["error"]) == ("completed", None)
            assert count_frames(http.get(f"/v1/videos/{job}/content").raise_for_status().content) == count
        for job, viewer in viewers.items():
            assert count_frames(viewer.end()) == frames[job]
    return list(frames)


@pytest.mark.thorough
def test_versions_work_beside_each_other(earlier, tmp_path):
    """The new ingress changes the schema while the old processes run; a worker of the other version makes its jobs."""
    with Version(earlier, tmp_path) as old, Version(ROOT, tmp_path) as new:
        old_address, _, new_address = old.tell("ingress"), old.tell("worker"), new.tell("ingress")
        jobs = make_all_kinds(new_address, old)
        old.tell("rest")
        new.tell("worker")
        jobs += make_all_kinds(old_address, new)
        database = open_database(tmp_path / "jobs.sqlite")
        assert [JobStore(database).get(job).attempts for job in jobs] == [1] * 6
        database.close()


def wait_for_earlier_worker(http):
    """Wait until the worker of the earlier version has made a job, so that it has seen those before it."""
    assert wait_for_end(http, create(http, num_frames=5, generate_audio=False).json()["id"])["status"] == "completed"


def test_earlier_version_leaves_what_it_does_not_know(earlier, tmp_path):
    """It also takes such a job back whose worker is lost, and the next one goes on after what was made."""
    with Version(earlier, tmp_path) as old, Version(ROOT, tmp_path) as new, Version(ROOT, tmp_path) as lost:
        for command in ("ingress", "worker", "go"):
            old.tell(command)
        for version in (new, lost):
            version.tell("motion")
        address = new.tell("ingress")
        database = open_database(tmp_path / "jobs.sqlite")
        store = JobStore(database)
        with open_client(address) as http:
            look = {"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (96, 64), "teal"))}}
            chain = create(http, seed=1, num_frames=39, next_prompts=["it sits", "it runs"], input_references=[look])
            id = chain.json()["id"]
            wait_for_earlier_worker(http)
            assert (store.get(id).status, store.get(id).attempts) == ("queued", 0)
            lost.tell("worker")
            lost.tell("once")
            wait_for(lambda: len(store.get(id).segments) == 1)
            lost.kill()
            with database.write() as session:
                session.execute(update(Job).where(Job.id == id).values(lease_expires_at=0.0))
            wait_for(lambda: store.get(id).status == "queued")
            new.tell("worker")
            new.tell("go")
            assert wait_for_end(http, id)["status"] == "completed"
            made = store.get(id)
            assert [made.results[f"part-{number}"].split(".")[1] for number in (1, 2, 3)] == ["1", "2", "2"]
            video = http.get(f"/v1/videos/{id}/content").raise_for_status().content
            assert count_frames(video) == 39 + 2 * 17
            new.tell("rest")
            again = http.post(f"/v1/videos/{id}/segments/2/redo", json={"prompt": "it sleeps"}).json()["id"]
            wait_for_earlier_worker(http)
            assert (store.get(again).status, store.get(again).attempts) == ("queued", 0)
            new.tell("worker")
            assert wait_for_end(http, again)["status"] == "completed"
            assert count_frames(http.get(f"/v1/videos/{again}/content").raise_for_status().content) == 39 + 2 * 17
            assert http.get(f"/v1/videos/{id}/content").content == video
        database.close()
