"""The real application over HTTP and a real worker, without Ray: a small engine makes the videos."""

import asyncio
import base64
import collections
import contextlib
import dataclasses
import io
import itertools
import socket
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import uvicorn
from PIL import Image

from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.api.settings import ServiceSettings
from actors.api.worker.context import WorkerContext
from actors.api.worker.job_worker import JobWorker
from actors.engine import Fragment, GeneratedVideo, PreviewPicture
from actors.observe.span import Span
from actors.slices.snapshots import Snapshots
from tests.actors.small_spec import SPEC
from tests.waiting import wait_for
from wan_tpu.media.video import VideoWriter
from wan_tpu.tail import Tail

MODEL = "small-wan"


@contextlib.contextmanager
def running(work):
    """Run a coroutine in a thread of its own, and cancel it at the end of the block."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def run():
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(20)
        loop.close()


@contextlib.contextmanager
def serve(settings, spec=SPEC):
    """Serve the application with uvicorn, and yield its address."""
    with listening(make_app(Service(settings, spec))) as address:
        yield address


@contextlib.contextmanager
def listening(app):
    """Serve any application with uvicorn, and yield its address."""
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
    """Makes small but real mp4 files whose frames have one colour, which depends on the seed. Steps wait for `go`."""

    model = SPEC

    def __init__(self, folder: Path):
        self._folder, self._files = folder, itertools.count()
        self.go = threading.Event()
        self.go.set()
        self.failure = None
        self.requests = []
        self.ids = []
        self.priorities = []
        self.forgotten = []
        self.under_way = 0
        self.compile_s = 0.0  # Seconds that the first step waits for its program.
        self.warnings = ()
        self.losses = 0  # How often a decoder is lost before all is decoded.
        self.previews = {}  # JPEGs by step.

    async def check_ready(self):
        pass

    async def forget(self, id):
        self.forgotten.append(id)

    async def generate(self, plan, *, id, on_event, priority=0, on_fragment=None, on_preview=None):
        request = plan.request
        self.requests.append(request)
        self.ids.append(id)
        self.priorities.append(priority)
        self.under_way += 1
        try:
            on_event(span(id, "encoder"))
            if self.compile_s:
                on_event(
                    dataclasses.replace(span(id, "denoise_high", seconds=self.compile_s), kind="compile", pool="high")
                )
            for step in range(1, request.steps + 1):
                on_event(span(id, "denoise_high" if step <= 2 else "denoise_low", step))
                if step in self.previews:
                    on_preview(PreviewPicture(step, self.previews[step]))
                while not self.go.is_set():
                    await asyncio.sleep(0.01)
                if self.failure is not None:
                    raise self.failure
            mp4 = await asyncio.to_thread(self.video, self.redo(request, self.losses), id)
            await self.decode(request, id, on_fragment)
            on_event(span(id, "decoder"))
            return GeneratedVideo(mp4, self.warnings, tail=make_tail(request).dump() if request.keeps_tail else None)
        finally:
            self.under_way -= 1

    async def decode(self, request, id, on_fragment):
        """Pass on the video's fragments. This engine passes on none, as one that can't stream."""

    def redo(self, request, run):
        """Return the request that is decoded again after a loss: normally the same."""
        return request

    def video(self, request, name="made", on_fragment=None):
        path = self._folder / f"{name}-{next(self._files)}.mp4"  # A cancelled attempt may still write its own.
        shades = (np.arange(request.frames) * 7 + request.seed) % 256
        frames = [np.full((request.height, request.width, 3), shade, np.uint8) for shade in shades]
        with VideoWriter(path, fps=request.fps, overwrite=True, on_fragment=on_fragment) as writer:
            if rate := self.model.audio_rate:
                writer.set_audio(np.zeros((2, round(request.frames / request.fps * rate)), np.float32), rate)
            written = request.written_frames
            writer.write(frames[request.hidden_frames :][:written])
        return path.read_bytes()


def make_tail(request):
    """Return the end of a request's video: latents that are its seed."""
    latents = np.full((1, 16, 2, request.height // 8, request.width // 8), request.seed, np.float32)
    return Tail(latents, None, request.height, request.width, 22, 5)


class DecodingEngine(Engine):
    """Passes on a video's fragments: one for each `decoded.release()`.

    Attributes:
        decoded: Counts the fragments that may be passed on.
        fragments: Those of all runs, as they were passed on, by job.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self.decoded = threading.Semaphore(0)
        self.fragments = collections.defaultdict(list)

    async def decode(self, request, id, on_fragment):
        for run in range(self.losses + 1):
            contents = []
            await asyncio.to_thread(self.video, self.redo(request, run), id, contents.append)
            for index, content in enumerate(contents[: None if run == self.losses else -1]):
                while not self.decoded.acquire(blocking=False):
                    await asyncio.sleep(0.01)
                if self.failure is not None:
                    raise self.failure
                self.fragments[id].append(content)
                on_fragment(Fragment(run, index, content))


def span(job, stage, step=None, seconds=0.25):
    now = time.time()
    return Span(
        slice="here", request=job, stage=stage, kind="compute", start_s=now - seconds, seconds=seconds, step=step
    )


@contextlib.contextmanager
def working(settings: ServiceSettings, engine, *, name="worker-1", traces=None):
    """Run a worker as a service's process does."""
    tools = WorkerContext(settings, engine, Snapshots(f"{settings.storage}-snapshots"), traces=traces)
    with running(JobWorker(name, tools).run()):
        yield tools
    tools.database.close()


def open_client(address, **more):
    """Return a client that waits for an answer as long as a busy machine may take; httpx's own gives up after 5 s."""
    return httpx.Client(base_url=address, timeout=60, **more)


def create(http, headers=None, **fields):
    return http.post("/v1/videos", json={"prompt": "a cat", **fields}, headers=headers or {})


def wait_for_end(http, job):
    def poll():
        video = http.get(f"/v1/videos/{job}").json()
        return video["status"] in ("completed", "failed") and video

    return wait_for(poll, "the end of the job", 0.1)  # Each poll costs milliseconds.


def bearer(key):
    """Return the header with a key."""
    return {"Authorization": f"Bearer {key}"}


def data_url(content, kind="image/png"):
    """Return the URL that contains a file, or an image as a PNG."""
    if isinstance(content, Image.Image):
        png = io.BytesIO()
        content.save(png, "PNG")
        content = png.getvalue()
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def change_limits(settings, **changes):
    """Return a service's settings with other limits."""
    return dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, **changes))


def change_reliability(settings, **changes):
    """Return a service's settings with other time-outs or attempts."""
    return dataclasses.replace(settings, reliability=dataclasses.replace(settings.reliability, **changes))
