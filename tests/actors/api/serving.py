"""The real application over real HTTP, and a real worker, without Ray: what makes the videos is a small engine here."""

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn

from actors.api.admission import FixedPlanner
from actors.api.app import make_app
from actors.api.attempt import Tools, WorkerSettings
from actors.api.service import Service
from actors.api.settings import ServiceSettings
from actors.api.upkeep import upkeep
from actors.api.webhook import Webhooks
from actors.api.worker import Worker
from actors.jobs.database import Database
from actors.jobs.deliveries import Deliveries
from actors.jobs.notices import Notices
from actors.jobs.retention import Retention
from actors.jobs.work import WorkQueue
from actors.storage import open_storage
from actors.timeline import Span
from wan_tpu.request import Defaults
from wan_tpu.video import VideoWriter

MODEL = "small-wan"
DEFAULTS = Defaults(height=64, width=96, frames=9, fps=16, steps=4, guidance_scale=3.5, guidance_scale_2=3.0, shift=5.0)


class Loop:
    """An event loop in a thread, for what runs beside a test."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextlib.contextmanager
def served(settings, planner=None):
    """Give the address of the application, served by uvicorn."""
    app = make_app(Service(settings, planner or FixedPlanner(DEFAULTS)))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()


class Engine:
    """Makes real, small mp4 files: frames of one colour that changes, by the seed. Steps wait for `go`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.go = threading.Event()
        self.go.set()
        self.failure = None
        self.asked = []
        self.priorities = []
        self.under_way = 0
        self.compilations = []

    async def compiled(self):
        found, self.compilations = self.compilations, []
        return found

    async def generate(self, request, *, id, on_event, priority):  # noqa: A002
        self.asked.append(request)
        self.priorities.append(priority)
        self.under_way += 1
        try:
            on_event(span(id, "encoder"))
            for step in range(1, request.steps + 1):
                on_event(span(id, "denoise_high" if step <= 2 else "denoise_low", step))
                while not self.go.is_set():
                    await asyncio.sleep(0.01)
                if self.failure is not None:
                    raise self.failure
            mp4 = await asyncio.to_thread(self.video, request, id)
            on_event(span(id, "decoder"))
            return mp4
        finally:
            self.under_way -= 1

    def video(self, request, name="made"):
        path = self._folder / f"{name}.mp4"
        shades = (np.arange(request.frames) * 7 + request.seed) % 256
        frames = [np.full((request.height, request.width, 3), shade, np.uint8) for shade in shades]
        with VideoWriter(path, fps=request.fps, overwrite=True) as writer:
            writer.write(frames)
        return path.read_bytes()


def span(job, stage, step=None, seconds=0.25):
    now = time.time()
    return Span(slice="here", request=job, stage=stage, what="compute", start_s=now - seconds, end_s=now, step=step)


@contextlib.contextmanager
def working(settings: ServiceSettings, engine, *, name="worker-1", **tools):
    """Run a worker with its upkeep, as a process of a service does."""
    loop, database = Loop(), Database(settings.database)
    storage, queue = open_storage(settings.storage), WorkQueue(database, settings.leases, settings.keeping)
    made = Tools(
        queue=queue,
        storage=storage,
        engine=engine,
        settings=WorkerSettings(concurrency=settings.concurrency, chips={"denoise_high": 4, "denoise_low": 8}),
        **tools,
    )
    webhooks = None
    if settings.webhook_secret_file is not None:
        from actors.api.service import webhook_fetching
        from actors.api.webhook import read_secret

        secret = read_secret(Path(settings.webhook_secret_file), make=True)
        webhooks = Webhooks(Deliveries(database), secret, webhook_fetching(settings), made.meters)
    retention = Retention(database, storage, settings.keeping)
    tasks = [
        loop.start(Worker(name, made).run()),
        loop.start(upkeep(name, queue, retention, Notices(database), made.meters, webhooks)),
    ]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        wait_for(lambda: not loop.start(others()).result(5))
        loop.close()
        database.close()


async def others():
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def wait_for(found, seconds=20.0, what="it"):
    give_up = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < give_up, f"{what} doesn't come"
        time.sleep(0.02)
    return value


def create(http, headers=None, **fields):
    return http.post("/v1/videos", json={"prompt": "a cat", **fields}, headers=headers or {})


def done(http, job):
    return wait_for(lambda: (v := http.get(f"/v1/videos/{job}").json())["status"] in ("completed", "failed") and v)
