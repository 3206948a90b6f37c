"""What many viewers of one long video cost an ingress, which is a process of its own, and whoever else uses it."""

import contextlib
import dataclasses
import hashlib
import http.client
import multiprocessing
import selectors
import socket
import statistics
import threading
import time
import urllib.parse

import httpx
import psutil
import pytest
import uvicorn
from sqlalchemy import update

from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.jobs.keys import make_key
from actors.jobs.store import JobStore
from actors.jobs.tables import Job, StoredFragment
from actors.jobs.values import Progress
from actors.jobs.work import WorkQueue
from tests.actors.api.serving import bearer, change_limits, create
from tests.actors.small_spec import SPEC
from tests.waiting import wait_for
from wan_tpu.media.boxes import make_box
from wan_tpu.storage.opening import open_storage

pytestmark = pytest.mark.soak


def run_ingress(settings, port):
    """Run an ingress: the body of a process."""
    uvicorn.run(make_app(Service(settings, SPEC)), host="127.0.0.1", port=port, log_level="warning")


class Ingress:
    """An ingress in a process of its own."""

    def __init__(self, settings):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._process = multiprocessing.get_context("spawn").Process(target=run_ingress, args=(settings, port))
        self._process.start()
        wait_for(self._answers)

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self._process.join()

    def _answers(self):
        try:
            return httpx.get(f"{self.address}/health", timeout=60).status_code == 200
        except httpx.TransportError:
            return False


@dataclasses.dataclass
class Video:
    """A job whose fragments are stored and shown as a worker does it, but faster."""

    database: object
    settings: object
    job: str
    parts: int = 0

    def add(self, count, size):
        storage, rows = open_storage(self.settings.storage), []
        for number in range(self.parts, self.parts + count):
            content = make_box(b"mdat", number.to_bytes(4) * (size // 4 - 2))
            digest, name = hashlib.sha256(content).hexdigest(), f"{self.job}.1.0-{number:04}.mp4"
            storage.write(name, content)
            rows.append(StoredFragment(name=name, job=self.job, attempt=1, run=0, number=number, digest=digest))
        self.parts += count
        with self.database.write() as session:
            session.add_all(rows)
            session.execute(update(Job).where(Job.id == self.job).values(fragments=self.parts))


def receive(address, path, headers, count, received, reading):
    """Open streams and read all of them, or nothing while `reading` isn't set: the body of a process."""
    url, lines = urllib.parse.urlsplit(address), "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    selector = selectors.DefaultSelector()
    for number in range(count):
        opened = socket.create_connection((url.hostname, url.port))
        opened.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
        selector.register(opened, selectors.EVENT_READ, number)
    reading.wait()
    while True:
        for key, _ in selector.select():
            if data := key.fileobj.recv(1 << 18):
                received[key.data] += len(data)
            else:
                selector.unregister(key.fileobj)


@contextlib.contextmanager
def viewers(address, path, headers, count):
    """Open streams in another process; yield how many bytes each has received, and the event by which they read."""
    spawn = multiprocessing.get_context("spawn")
    received, reading = spawn.Array("q", count, lock=False), spawn.Event()
    process = spawn.Process(target=receive, args=(address, path, headers, count, received, reading), daemon=True)
    process.start()
    try:
        yield received, reading
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def polling(address, path, headers):
    """Poll every 20 ms; yield the milliseconds that each poll took."""
    url, took_ms, ended = urllib.parse.urlsplit(address), [], threading.Event()

    def poll():
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        while not ended.wait(0.02):
            start = time.perf_counter()
            connection.request("GET", path, headers=headers)
            assert connection.getresponse().read()
            took_ms.append((time.perf_counter() - start) * 1e3)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield took_ms
    finally:
        ended.set()
        thread.join()


def describe(name, took_ms):
    cuts = statistics.quantiles(took_ms, n=20)
    print(f"{name}: p50 {cuts[9]:.0f} ms, p95 {cuts[18]:.0f}, most {max(took_ms):.0f}, of {len(took_ms)} polls")
    return cuts[18]


@contextlib.contextmanager
def serving(settings, database):
    """Run an ingress with two keys that have a job each; yield both headers, both jobs and the process."""
    headers = [bearer(make_key(database, name)) for name in ("ann", "bob")]
    ingress = Ingress(settings)
    try:
        with httpx.Client(base_url=ingress.address, timeout=60) as client:
            jobs = [create(client, header).json()["id"] for header in headers]
        assert WorkQueue(database).claim("w").id == jobs[0]
        yield ingress, headers, jobs
    finally:
        ingress.kill()


def test_many_viewers_of_a_long_video_delay_nobody_s_polls(settings, database):
    """The target is a p95 of 50 ms on two cores that do nothing else."""
    count, fragments, size = 100, 2000, 2000
    settings = change_limits(settings, followers=count, requests_per_minute=1e5)
    with serving(settings, database) as (ingress, (ann, bob), (job, other)):
        video = Video(database, settings, job)
        video.add(fragments, size)
        with polling(ingress.address, f"/v1/videos/{other}", bob) as alone:
            time.sleep(3)
        path = f"/v1/videos/{job}/content?stream=1"
        with viewers(ingress.address, path, ann, count) as (received, reading):
            reading.set()
            with polling(ingress.address, f"/v1/videos/{other}", bob) as joining:
                start = time.monotonic()
                wait_for(lambda: min(received) > fragments * size)
                took_s = time.monotonic() - start
            with polling(ingress.address, f"/v1/videos/{other}", bob) as watching:
                for _ in range(20):
                    video.add(1, size)
                    time.sleep(0.4)
                wait_for(lambda: min(received) > video.parts * size)
    print(f"{count} viewers of {fragments} fragments have all after {took_s:.1f} s")
    describe("alone", alone)
    assert describe("while they join", joining) < 300
    assert describe("while they watch", watching) < 150


def test_events_of_a_job_of_long_prompts_cost_little(settings, database):
    """Its prompts have 480,000 characters, which no event repeats."""
    settings = change_limits(settings, followers=100, requests_per_minute=1e5)
    with serving(settings, database) as (ingress, (ann, bob), (job, other)):
        queue, store = WorkQueue(database), JobStore(database)
        plain = store.get(job)
        request = plain.request | {"next_prompts": ["x" * 16_000] * 29, "prompt": "x" * 16_000}
        job = store.submit(Job(owner=plain.owner, request=request, priority=1))[0].id
        claimed = queue.claim("w")
        assert claimed.id == job
        process = psutil.Process(ingress.pid)
        before = process.memory_info().rss
        with viewers(ingress.address, f"/v1/videos/{job}/events", ann, 100) as (received, reading):
            reading.set()
            wait_for(lambda: min(received) > 1000)
            with polling(ingress.address, f"/v1/videos/{other}", bob) as took_ms:
                for step in range(20):
                    claimed.progress = Progress(stage="denoise", step=step, steps=50, percent=step)
                    queue.renew_lease(claimed)
                    time.sleep(0.5)
            rss, sent = process.memory_info().rss - before, sum(received)
    print(f"100 event streams cost {rss / 2**20:.0f} MiB and sent {sent / 1e6:.1f} MB")
    assert describe("while they follow", took_ms) < 150
    assert rss < 150 * 2**20


@pytest.mark.parametrize("reads", [True, False])
def test_viewers_of_a_long_video_hold_little_memory(settings, database, reads):
    count, fragments, size = 30, 80, 1_000_000
    with serving(settings, database) as (ingress, (ann, _), (job, _)):
        Video(database, settings, job).add(fragments, size)
        process = psutil.Process(ingress.pid)
        before = process.memory_info().rss
        with viewers(ingress.address, f"/v1/videos/{job}/content?stream=1", ann, count) as (received, reading):
            most = before
            if reads:
                reading.set()
            end = time.monotonic() + 4
            while (reads and min(received) < fragments * size) or time.monotonic() < end:
                most = max(most, process.memory_info().rss)
                time.sleep(0.02)
    print(f"{count} viewers of {fragments * size / 1e6:.0f} MB cost {(most - before) / 2**20:.0f} MiB")
    assert most - before < 100 * 2**20
