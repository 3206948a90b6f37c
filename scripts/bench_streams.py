#!/usr/bin/env python3
"""Watch videos of real sizes while they are decoded, and report the cost: waiting, bytes and processor time.

python scripts/bench_streams.py
python scripts/bench_streams.py --case "Helios in int8, v6e-1" --viewers 4

Everything after the frames is real: encoder, fragments, database, storage, an ingress in its own process, and viewers
over HTTP. The frames are drawn (a textured picture that pans, with film grain), and arrive as fast as a decoder is
predicted to make them (docs/benchmarks.md). A viewer plays from the first fragment on, and stalls if the next picture
doesn't arrive in time.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import multiprocessing
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue

import httpx
import numpy as np
import psutil
import uvicorn

from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.api.settings import ServiceSettings
from actors.api.worker.context import WorkerContext
from actors.api.worker.job_worker import JobWorker
from actors.engine import Fragment, GeneratedVideo, OnEvent, OnFragment, OnPreview
from actors.slices.snapshots import Snapshots
from wan_tpu.families import published_spec
from wan_tpu.media.boxes import FREE
from wan_tpu.media.fragments import FRAGMENT_FRAMES, FragmentSplitter
from wan_tpu.media.mp4 import Mp4
from wan_tpu.plan import RequestPlan

DECODED = 17  # Frames, after which the time to the first picture is counted.


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's video.

    Attributes:
        model: The model that the request is for; TurboWan's differs from A14B's only in size and steps, and takes only
            images.
        pieces: How many frames come at a time, first and later.
        every_s: The time between two pieces.
        chunk: How many frames are denoised at a time; 0 for all.
        chunk_s: The time between two chunks.
    """

    model: str
    height: int
    width: int
    frames: int
    fps: int
    pieces: tuple[int, int]
    every_s: float
    chunk: int = 0
    chunk_s: float = 0.0


CASES = {
    "A14B, v6e-8": Case("wan2.2-t2v-a14b", 480, 832, 81, 16, (1, 4), 0.008),
    "A14B, a decoder of 0.12 s a latent frame": Case("wan2.2-t2v-a14b", 480, 832, 81, 16, (1, 4), 0.12),
    "TurboWan, v6e-8": Case("wan2.2-t2v-a14b", 720, 1280, 81, 16, (1, 4), 0.016),
    "Helios in int8, v6e-8": Case("helios-distilled", 384, 640, 330, 24, (1, 4), 0.005, 33, 0.27),
    "Helios in int8, v6e-1": Case("helios-distilled", 384, 640, 330, 24, (1, 4), 0.036, 33, 1.2),
}


class DrawingEngine:
    """Draws frames instead of running a model, at a decoder's pace."""

    def __init__(self, case: Case) -> None:
        self.model, self._case = published_spec(case.model), case
        self.go = asyncio.Event()
        self.came: list[float] = []  # When each frame was ready.
        self.mp4_bytes, self.encoder_s = 0, 0.0
        self._picture = draw_picture(2 * case.height, 2 * case.width)
        self._drawn = [self._draw(index) for index in range(case.frames)]

    async def check_ready(self) -> None:
        """Be ready."""

    async def forget(self, id: str) -> None:
        """Keep nothing."""

    async def generate(
        self,
        plan: RequestPlan,
        *,
        id: str,
        on_event: OnEvent,
        priority: int = 0,
        on_fragment: OnFragment | None = None,
        on_preview: OnPreview | None = None,
    ) -> GeneratedVideo:
        """Wait for `go`, then draw the frames and encode them as a decoder's host does."""
        await self.go.wait()
        content = await asyncio.to_thread(self._encode, on_fragment)
        self.mp4_bytes = len(content)
        return GeneratedVideo(content)

    def _encode(self, on_fragment: OnFragment | None) -> bytes:
        case, sent, before_s = self._case, 0, children_s()

        def send(content: bytes) -> None:
            nonlocal sent
            assert on_fragment is not None
            on_fragment(Fragment(0, sent, content))
            sent += 1

        due = time.perf_counter()
        with Mp4(case.fps, None if on_fragment is None else send) as mp4:
            for start, stop in pieces_of(case):
                planes = np.stack(self._drawn[start:stop])
                due += case.chunk_s if case.chunk and start and start % case.chunk == 0 else case.every_s
                time.sleep(max(0.0, due - time.perf_counter()))
                mp4.add(planes)
                self.came += [time.time()] * len(planes)
            mp4.finish()
        if mp4.failure is not None:
            raise mp4.failure
        self.encoder_s = children_s() - before_s
        return mp4.content

    def _draw(self, index: int) -> np.ndarray:
        height, width = self._case.height, self._case.width
        y, x = (3 * index // 2) % height, (2 * index) % width
        grain = np.random.default_rng(index).integers(-8, 9, (1, height, width), np.int16)
        return np.clip(self._picture[:, y : y + height, x : x + width] + grain, 0, 255).astype(np.uint8)


def pieces_of(case: Case) -> Iterator[tuple[int, int]]:
    """Yield the first and last frame of each group that arrives together; every chunk starts a new group."""
    first, later = case.pieces
    start = 0
    while start < case.frames:
        in_chunk = start % case.chunk if case.chunk else start
        stop = min(case.frames, start + (later if in_chunk else first))
        yield start, stop
        start = stop


def draw_picture(height: int, width: int) -> np.ndarray:
    """Return a picture with structures of all sizes, int16 [3, H, W]: noise that is weaker the finer it is."""
    draw, picture = np.random.default_rng(0), np.zeros((3, height, width))
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        noise = draw.normal(size=(3, height // size + 2, width // size + 2)) * size**0.75
        picture += np.kron(noise, np.ones((1, size, size)))[:, :height, :width]
    return (128 + 40 * picture / picture.std()).clip(0, 255).astype(np.int16)


def serve(settings: ServiceSettings, model: str, port: int) -> None:
    """Run an ingress: the body of a process."""
    uvicorn.run(make_app(Service(settings, published_spec(model))), host="127.0.0.1", port=port, log_level="warning")


def watch(address: str, job: str, arrivals: "Queue[list[tuple[float, int]]]") -> None:
    """Watch a video, and report when each fragment arrived and its length: the body of a process."""
    splitter, came = FragmentSplitter(), []
    with httpx.stream("GET", f"{address}/v1/videos/{job}/content?stream=1", timeout=600) as answer:
        for data in answer.iter_raw():
            came += [(time.time(), len(fragment)) for fragment in splitter.add(data.replace(FREE, b""))]
    arrivals.put(came)


def stall(case: Case, arrivals: list[float]) -> tuple[int, float]:
    """Return how often, and how long in all, a viewer who plays from the first fragment on has to wait."""
    count, late = 0, 0.0
    for index, came in enumerate(arrivals):
        due = arrivals[0] + index * FRAGMENT_FRAMES / case.fps + late
        if came > due + 0.04:  # For less than a frame's time, the previous picture is just shown longer.
            count, late = count + 1, late + came - due
    return count, late


async def measure(name: str, case: Case, viewers: int) -> None:
    """Have one video made and watched, and print a line about it."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        settings = ServiceSettings(database=f"{folder}/jobs.sqlite", storage=f"{folder}/results", model=case.model)
        ingress = processes.Process(target=serve, args=(settings, case.model, port), daemon=True)
        ingress.start()
        engine, address = DrawingEngine(case), f"http://127.0.0.1:{port}"
        context = WorkerContext(settings, engine, Snapshots(f"{folder}/snapshots"))
        working = asyncio.create_task(JobWorker("worker", context).run())
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            await until(lambda: is_open(port))
            size = {"size": f"{case.width}x{case.height}", "num_frames": case.frames, "fps": case.fps}
            created = (await http.post("/v1/videos", json={"prompt": "a picture pans", **size})).raise_for_status()
            job, arrivals = created.json()["id"], processes.Queue()
            clients = [processes.Process(target=watch, args=(address, job, arrivals)) for _ in range(viewers)]
            for client in clients:
                client.start()
            await asyncio.sleep(4 + viewers)  # The worker knows of them by then.
            before_s = cpu_s(ingress.pid)
            engine.go.set()
            results = [await asyncio.to_thread(arrivals.get) for _ in clients]
            spent_s = cpu_s(ingress.pid) - before_s
        working.cancel()
        await asyncio.wait([working])
        context.database.close()
        ingress.terminate()
        ingress.join()
    came = results[0]
    count, waited = stall(case, [at for at, _ in came])
    total = sum(length for _, length in came)
    print(
        f"{name}: first fragment {came[0][0] - engine.came[DECODED - 1]:.2f} s after frame {DECODED}, the last "
        f"{came[-1][0] - engine.came[-1]:.2f} s after the last frame; {count} stalls, {waited:.2f} s; "
        f"{total / 1e6:.2f} MB in {len(came)} fragments, the finished file {engine.mp4_bytes / 1e6:.2f} MB; "
        f"CPU: encoder {engine.encoder_s:.2f} s, ingress {spent_s / viewers:.3f} s a viewer",
        flush=True,
    )


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    while not holds():
        await asyncio.sleep(0.1)


def is_open(port: int) -> bool:
    """Return whether something listens at a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def cpu_s(pid: int | None) -> float:
    """Return the processor time of a process."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def children_s() -> float:
    """Return the processor time of children that have ended: encoders."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="which videos (default: all)")
    parser.add_argument("--viewers", type=int, default=1, help="of each")
    args = parser.parse_args()
    for title in args.case or CASES:
        asyncio.run(measure(title, CASES[title], args.viewers))
