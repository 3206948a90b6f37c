#!/usr/bin/env python3
"""Measure what jobs of several segments cost: memory of a worker, turns of other keys, bytes written after a loss.

python scripts/measure_chains.py
python scripts/measure_chains.py --only memory

Another checkout is measured with its own code, from its folder:

git worktree add ../before REVISION
cd ../before && PYTHONPATH=. ../main/.venv/bin/python ../main/scripts/measure_chains.py

Everything but the model is real: database, storage, an ingress and workers in processes of their own, files that join
by copying, their fragments, and a viewer over HTTP. Frames of noise are encoded once; every segment has their bytes.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import uvicorn

import actors
from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.api.settings import ServiceSettings
from actors.api.worker.context import WorkerContext
from actors.api.worker.job_worker import JobWorker
from actors.engine import Fragment, GeneratedVideo, OnEvent, OnFragment, OnPreview
from actors.jobs.keys import make_key
from actors.jobs.store import open_database
from actors.reliability import ReliabilitySettings
from actors.slices.snapshots import Snapshots
from wan_tpu.families import published_spec
from wan_tpu.media.mp4 import Mp4
from wan_tpu.plan import RequestPlan

MODEL = "wan2.2-ti2v-5b"
FPS = 16
PROCESSES = multiprocessing.get_context("spawn")
FRAGMENT = re.compile(r"video_.+\.\d+-\d{4}\.[0-9a-f]{16}\.mp4")  # The names of fragments in storage.
SAMPLE_S = 0.01


@dataclasses.dataclass(frozen=True)
class Videos:
    """Segments that are encoded already: a first one, and a later one, which begins a frame later.

    Attributes:
        folder: Where they are.
        height: Of a frame, in pixels.
        width: Of a frame, in pixels.
        frames: The frames of a first segment.
        noise: The range of the noise, of 256, which decides how large the files are.
    """

    folder: Path
    height: int
    width: int
    frames: int
    noise: int

    def make(self) -> None:
        """Encode both segments, and store them with their fragments."""
        for hidden in (0, 1):
            folder, draw = self._get(hidden), np.random.default_rng(0)
            folder.mkdir(parents=True)
            fragments: list[bytes] = []
            with Mp4(FPS, fragments.append, hidden_frames=hidden) as mp4:
                for _ in range(self.frames):
                    mp4.add(draw.integers(0, self.noise, (1, 3, self.height, self.width), np.uint8))
                mp4.finish()
                if mp4.failure is not None:
                    raise mp4.failure
                assert mp4.last_frame is not None
                np.save(folder / "last.npy", mp4.last_frame)
            (folder / "video.mp4").write_bytes(mp4.content)
            for index, content in enumerate(fragments):
                (folder / f"{index:04}.fragment").write_bytes(content)

    def measure(self, segments: int) -> int:
        """Return the bytes of the files of a job's segments."""
        first, later = ((self._get(hidden) / "video.mp4").stat().st_size for hidden in (0, 1))
        return first + (segments - 1) * later

    def read(self, hidden: int) -> GeneratedVideo:
        """Return a segment, read from its file."""
        folder = self._get(hidden)
        return GeneratedVideo((folder / "video.mp4").read_bytes(), last_frame=np.load(folder / "last.npy"))

    def list_fragments(self, hidden: int) -> list[Path]:
        """Return the files of a segment's fragments, in order."""
        return sorted(self._get(hidden).glob("*.fragment"))

    def _get(self, hidden: int) -> Path:
        return self.folder / f"hidden-{hidden}"


class ReplayingEngine:
    """Takes the same time for each segment, passes on its fragments meanwhile, and writes down when each one began."""

    def __init__(self, videos: Videos, segment_s: float, log: Path) -> None:
        self.model = published_spec(MODEL)
        self._videos, self._segment_s, self._log = videos, segment_s, log

    async def check_ready(self) -> None:
        """Note that the worker is idle now: this is called before its first claim."""
        self._log.with_name("idle").touch()

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
        """Return a segment after `segment_s`."""
        with self._log.open("a") as log:
            log.write(json.dumps([id, time.time()]) + "\n")
        hidden = plan.request.hidden_frames
        fragments, due = self._videos.list_fragments(hidden), time.monotonic()
        for index, path in enumerate(fragments):
            due += self._segment_s / len(fragments)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if on_fragment is not None:
                on_fragment(Fragment(0, index, path.read_bytes()))
        return self._videos.read(hidden)


def serve(settings: ServiceSettings, port: int) -> None:
    """Run an ingress: the body of a process."""
    uvicorn.run(make_app(Service(settings, published_spec(MODEL))), host="127.0.0.1", port=port, log_level="warning")


def work(settings: ServiceSettings, name: str, engine: dict[str, Any]) -> None:
    """Run a worker: the body of a process."""
    context = WorkerContext(settings, ReplayingEngine(**engine), Snapshots(f"{settings.storage}-snapshots"))
    asyncio.run(JobWorker(name, context).run())


class Stand:
    """A service with an ingress, and with workers that are started one at a time."""

    def __init__(
        self, folder: Path, videos: Videos, *, concurrency: int, segment_s: float, lease_s: float = 30
    ) -> None:
        self.settings = ServiceSettings(
            database=f"{folder}/jobs.sqlite",
            storage=f"{folder}/results",
            model=MODEL,
            concurrency=concurrency,
            reliability=ReliabilitySettings(lease_s=lease_s),
        )
        self.database = open_database(self.settings.database)
        self._videos, self._log = videos, folder / "begun"
        self._engine = {"videos": videos, "segment_s": segment_s, "log": self._log}
        self._processes: list[BaseProcess] = []
        self.address = ""

    def connect(self, name: str) -> httpx.Client:
        """Return a client with a new key."""
        key = make_key(self.database, name)
        return httpx.Client(base_url=self.address, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    @contextlib.contextmanager
    def open(self) -> Iterator["Stand"]:
        """Run the ingress until the block ends; workers end as well."""
        self._log.touch()
        port = find_port()
        self.address = f"http://127.0.0.1:{port}"
        try:
            self._start(serve, self.settings, port)
            wait_until(self._answers)
            yield self
        finally:
            for process in self._processes:
                process.kill()
                process.join()
            self.database.close()

    def start_worker(self) -> BaseProcess:
        """Start another worker."""
        return self._start(work, self.settings, f"worker-{len(self._processes)}", self._engine)

    def create(self, http: httpx.Client, segments: int) -> str:
        """Create a job of some segments; return its id."""
        fields = {"size": f"{self._videos.width}x{self._videos.height}", "num_frames": self._videos.frames, "fps": FPS}
        later = {"next_prompts": ["on"] * (segments - 1)} if segments > 1 else {}
        answer = http.post("/v1/videos", json={"prompt": "noise", **fields, **later})
        if answer.is_error:
            raise SystemExit(answer.text)
        return answer.json()["id"]

    def list_begun(self) -> list[tuple[str, float]]:
        """Return the job of each segment that was begun, and when, in Unix seconds."""
        return [(job, at) for job, at in map(json.loads, self._log.read_text().splitlines())]

    def _start(self, body: Callable[..., None], *args: Any) -> BaseProcess:
        process = PROCESSES.Process(target=body, args=args)
        process.start()
        self._processes.append(process)
        return process

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.address}/health", timeout=10).status_code == 200
        return False


def measure_memory(folder: Path, jobs: int = 5, segments: int = 4, frames: int = 81) -> None:
    """Print the memory of a worker with jobs of several large segments that nobody watches."""
    videos = Videos(folder / "videos", 480, 832, frames, 186)
    videos.make()
    stand = Stand(folder, videos, concurrency=jobs, segment_s=5)
    with stand.open(), httpx.Client(base_url=stand.address, timeout=60) as http:
        worker = psutil.Process(stand.start_worker().pid)
        while not (folder / "idle").exists():
            time.sleep(SAMPLE_S)
        time.sleep(2)
        idle = worker.memory_info().rss
        Path(f"/proc/{worker.pid}/clear_refs").write_text("5")  # Begins a new VmHWM.
        before_s, children = time.monotonic(), 0
        created = [stand.create(http, segments) for _ in range(jobs)]
        while not all(is_complete(http, job) for job in created):
            for _ in range(50):
                children = max(children, sum(measure_rss(child) for child in worker.children(recursive=True)))
                time.sleep(SAMPLE_S)
        took_s, peak = time.monotonic() - before_s, read_peak(worker.pid)
    size = videos.measure(segments)
    print(
        f"memory: {jobs} jobs of {size / 1e6:.1f} MB in {segments} segments, watched by nobody: the worker "
        f"+{(peak - idle) / 1e6:.0f} MB, {(peak - idle) / size / jobs:.2f} times the videos "
        f"(idle {idle / 1e6:.0f} MB); its child processes {children / 1e6:.0f} MB at most; all after {took_s:.0f} s",
        flush=True,
    )


def measure_turns(folder: Path, segments: int = 30, tries: int = 3) -> None:
    """Print how long a plain job waits behind another key's jobs of many segments, on two places."""
    videos, segment_s = Videos(folder / "videos", 64, 96, 9, 255), 0.4
    videos.make()
    for number in range(tries):
        (folder / f"{number}").mkdir()
        stand = Stand(folder / f"{number}", videos, concurrency=2, segment_s=segment_s)
        with stand.open(), stand.connect("ann") as ann, stand.connect("bob") as bob:
            long = [stand.create(ann, segments) for _ in range(2)]
            stand.start_worker()
            while len(stand.list_begun()) < 2:
                time.sleep(SAMPLE_S)
            time.sleep(segment_s * number / tries)  # Another moment of the segment each time.
            plain, came = stand.create(bob, 1), time.time()
            while plain not in dict(stand.list_begun()):
                time.sleep(SAMPLE_S)
            begun = stand.list_begun()
        start = dict(begun)[plain]
        later = [job for job, at in begun if came <= at < start]
        print(
            f"turns: behind two jobs of {segments} segments of {segment_s} s on two places, a plain job began after "
            f"{start - came:.2f} s, in which its place ended {1 + min(map(later.count, long))} segments",
            flush=True,
        )


def measure_loss(folder: Path, segments: int = 4, finished: int = 2) -> None:
    """Print how much is written for a viewer whose video's worker is killed after some segments."""
    videos, segment_s = Videos(folder / "videos", 480, 832, 33, 96), 6.0
    videos.make()
    stand = Stand(folder, videos, concurrency=1, segment_s=segment_s, lease_s=5)
    written: dict[str, int] = {}
    with stand.open(), httpx.Client(base_url=stand.address, timeout=60) as http, ThreadPoolExecutor() as threads:
        job = stand.create(http, segments)
        viewer = threads.submit(watch, stand.address, job)
        time.sleep(1)
        ended = threading.Event()
        looking = threads.submit(note_fragments, Path(stand.settings.storage), written, ended)
        first = stand.start_worker()
        wait_until(lambda: len(stand.list_begun()) == finished + 1, 120)
        time.sleep(segment_s / 10)  # The next segment has no fragment yet.
        first.kill()
        before = sum(written.values())
        stand.start_worker()
        wait_until(lambda: is_complete(http, job), 180)
        received, is_whole = viewer.result()
        ended.set()
        looking.result()
    total, made = sum(written.values()), len(stand.list_begun())
    print(
        f"loss: a viewer's worker was killed after {finished} of {segments} segments, when fragments of "
        f"{before / 1e6:.1f} MB had been written; {(total - before) / 1e6:.1f} MB followed, {len(written)} files; "
        f"the viewer received {received / 1e6:.1f} MB, {'to the end' if is_whole else 'cut off'}; "
        f"{made} segments were begun",
        flush=True,
    )


def watch(address: str, job: str) -> tuple[int, bool]:
    """Watch a video; return how many bytes came, and whether they are all."""
    count = 0
    with httpx.stream("GET", f"{address}/v1/videos/{job}/content?stream=1", timeout=600) as answer:
        try:
            for data in answer.iter_raw():
                count += len(data)
        except httpx.TransportError:
            return count, False
    return count, True


def note_fragments(storage: Path, written: dict[str, int], ended: threading.Event) -> None:
    """Write down the size of each fragment in storage, by its name, until that is ended."""
    while not ended.wait(SAMPLE_S):
        for path in storage.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if FRAGMENT.fullmatch(path.name) and path.is_file():
                    written[path.name] = path.stat().st_size


def is_complete(http: httpx.Client, job: str) -> bool:
    """Return whether a job is complete; exits if it failed."""
    video = http.get(f"/v1/videos/{job}").raise_for_status().json()
    if video["status"] == "failed":
        raise SystemExit(f"a job failed: {video['error']}")
    return video["status"] == "completed"


def read_peak(pid: int) -> int:
    """Return the most memory that a process has had, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure_rss(process: psutil.Process) -> int:
    """Return the memory of a process, in bytes; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss
    return 0


def find_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def wait_until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until something holds; raises `TimeoutError`."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(SAMPLE_S)


MEASURES: dict[str, Callable[[Path], None]] = {
    "memory": measure_memory,
    "plain-memory": functools.partial(measure_memory, segments=1, frames=321),
    "turns": measure_turns,
    "loss": measure_loss,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MEASURES, action="append", help="what to measure (default: all)")
    args = parser.parse_args()
    print(f"measured: {Path(actors.__file__).parents[1]}", flush=True)
    for name in args.only or MEASURES:
        with tempfile.TemporaryDirectory() as opened:
            MEASURES[name](Path(opened))
