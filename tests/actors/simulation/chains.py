"""A service whose jobs have several segments and are watched, in a simulated world.

Segments go on from the last frame of the one before or from its end, some jobs have references, and a segment of a
finished video may be made again. Workers, attempts, fragments, SQLite and the streams of ingresses are real. Engine,
ffmpeg and storage are simulated. Decoders, workers, ingresses, storage, database, ffmpeg and clock fail at random.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from actors.api.core.access import Caller
from actors.api.core.drafts import Drafts, Take
from actors.api.core.following import Streams, follow_watched
from actors.api.http import content as content_module
from actors.api.http import watching as watching_module
from actors.api.http.content import DownloadCut
from actors.api.segments import list_segments
from actors.api.settings import ServiceSettings
from actors.api.worker import context as worker_context
from actors.api.worker import held_bytes, job_worker, maintenance
from actors.api.worker.context import WorkerContext
from actors.api.worker.job_worker import JobWorker
from actors.engine import Fragment, GeneratedVideo
from actors.jobs.ending import expire_files
from actors.jobs.errors import CommitUncertain, JobNotFound, StoreUnavailable
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.stored_request import read_redo
from actors.jobs.tables import File, FileShare, Job, StoredFragment
from actors.jobs.values import JobSettings, Room
from actors.jobs.watching import Watched, look_at_watched
from actors.reliability import ReliabilitySettings
from scripts.simulation.simulated import SimulatedSpec
from tests.actors.simulation.bucket import Bucket, BucketOfProcess
from tests.actors.simulation.media import SIZE, UNLIKE, Media, encode_picture, split
from tests.actors.simulation.scenario import Result
from tests.actors.simulation.service import DatabaseOfProcess
from tests.actors.simulation.virtual_time import Stuck, virtual_time
from tests.actors.simulation.world import Process, World, digest
from wan_tpu.families.wan.published import PUBLISHED
from wan_tpu.media.boxes import FREE
from wan_tpu.media.video_content import VideoContent
from wan_tpu.plan import RequestPlan
from wan_tpu.reference import GOAL, Reference
from wan_tpu.request import GenerationRequest
from wan_tpu.storage.base import StorageError
from wan_tpu.tail import Overlap, Tail

SETTINGS = JobSettings(abandoned_s=100.0)
# Renewals and looks are rarer than in production, because each is a transaction of a real database.
RELIABILITY = ReliabilitySettings(
    renewal_s=3.0, queue_check_s=8.0, check_in_s=1000.0, pipeline_pause_s=2.0, job_attempts=40
)
LOOK_S = 1.0
FAULTS = (
    "worker",
    "stop",
    "earlier",
    "ingress",
    "decoder",
    "database",
    "answers",
    "down",
    "slow",
    "full",
    "clock",
    "ffmpeg",
)
FAULTS_S, LASTS_S, TIDY_S = 25.0, 900.0, 130.0
OWNERS = "ab"
HELD_BYTES = 350  # What a worker may hold: an end with its header is some 300 bytes, and references are up to 400.


class Spec(SimulatedSpec):
    """A model that plans each kind of request once."""

    tasks = ("t2v", "i2v")  # type: ignore[assignment]
    overlap = Overlap(frames=1, latents=1, blended=0)

    def plan(self, request: GenerationRequest, **_: Any) -> RequestPlan:  # type: ignore[override]
        plan = _plan(request.image is not None)
        changes = {name: getattr(request, name) for name in ("prompt", "seed", "image", "references")}
        return dataclasses.replace(plan, request=dataclasses.replace(plan.request, **changes))


MODEL = Spec(PUBLISHED["wan2.2-i2v-a14b"])


@functools.cache
def _plan(image: bool) -> RequestPlan:
    request = GenerationRequest(prompt="p", height=64, width=64, frames=5, steps=1, shift=5.0)
    return SimulatedSpec.plan(MODEL, request, image=image)


def make_part(prompt: str, seed: int, *seen: bytes) -> bytes:
    """Return what a segment becomes: one to three fragments, which depend on its request and on all that it sees."""
    content = bytes(byte & 0x7F for byte in digest("part", prompt, seed, *seen))
    part = content[: SIZE * (1 + content[0] % 3)]
    return UNLIKE + part[1:] if prompt == "unlike" else part


def make_tail(part: bytes) -> Tail:
    """Return the end of a segment."""
    return Tail(np.frombuffer(part[-3:], np.uint8).astype(np.float32).reshape(1, 3, 1, 1, 1), None, 64, 64, 1, 0)


def look_at(reference: Reference) -> bytes:
    """Return what a segment sees of a reference."""
    source = reference.source
    if isinstance(source, Tail):
        assert source.latents is not None
        return (GOAL * (reference.kind == GOAL)).encode() + source.latents.astype(np.uint8).tobytes()
    return source.content if isinstance(source, VideoContent) else source.tobytes()  # type: ignore[union-attr]


@dataclasses.dataclass
class Story:
    """What a job shows.

    Attributes:
        source: The video that it continues, if any.
        parts: Its segments.
        looks: The contents of its references.
        ends: The ends of its segments as they were first made. A segment that is made again must have the same.
    """

    source: bytes
    parts: list[bytes]
    looks: list[bytes]
    ends: list[bytes]

    @property
    def video(self) -> bytes:
        return self.source + b"".join(self.parts)


@dataclasses.dataclass
class Made:
    """A segment that was made: when the engine began it and returned it, and in which worker."""

    begin_s: float
    end_s: float
    worker: str


@dataclasses.dataclass
class Viewer:
    """A client that watched a job: when it came and ended, what it got, and why it was cut, if it was."""

    job: Job
    begin_s: float
    received: bytes = b""
    cut: str | None = None
    end_s: float = 0.0


class Engine:
    """Makes segments for one worker."""

    model = MODEL

    def __init__(self, service: "Chains", process: Process) -> None:
        self._service, self._process = service, process
        self._held: dict[str, int] = {}  # Bytes of the inputs of segments that are being made, by job.

    async def check_ready(self) -> None:
        pass

    async def forget(self, id: str) -> None:
        pass

    async def generate(
        self, plan: RequestPlan, *, id: str, on_event: Any, on_fragment: Any, **_: Any
    ) -> GeneratedVideo:
        service, request = self._service, plan.request
        references = request.references or ()
        seen = [] if request.image is None else [request.image.tobytes()]
        part = make_part(request.prompt, request.seed, *seen, *map(look_at, references))
        self._held[id] = sum(reference.nbytes for reference in references)
        if sum(self._held.values()) > HELD_BYTES and sum(map(bool, self._held.values())) > 1:
            service.problems.append(f"{self._process.name} holds more than it may: {self._held}")
        try:
            return await self._make(request, part, id, on_fragment)
        finally:
            del self._held[id]

    async def _make(self, request: Any, part: bytes, id: str, on_fragment: Any) -> GeneratedVideo:
        service, chance, loop = self._service, self._service.world.random, self._service.world.loop
        begin_s = loop.time()
        service.begun.append((begin_s, id))
        await asyncio.sleep(chance.uniform(1.5, 3.0))
        run, losses, fragments = 0, int(service.decoders_fail and chance.random() < 0.5), split(part)
        while True:
            for index, fragment in enumerate(fragments[: len(fragments) - (run < losses)]):
                on_fragment(Fragment(run, index, fragment))
                await asyncio.sleep(0.2)
            if run == losses:
                break
            run += 1
        if self._process.dead:
            await loop.create_future()
        service.made[id, request.seed].append(Made(begin_s, loop.time(), self._process.name))
        last = np.frombuffer(part[-3:], np.uint8).reshape(1, 1, 3) if chance.random() < 0.5 else None
        tail = make_tail(part).dump() if request.keeps_tail else None
        return GeneratedVideo(part, last_frame=last, tail=tail)


class Ingress:
    """What `actors.api.http.watching` uses of a service."""

    def __init__(self, service: "Chains", process: Process) -> None:
        self.process, self.settings = process, service.settings
        self.database = service.connect(process)
        self.store = JobStore(self.database, SETTINGS)
        self.storage = BucketOfProcess(service.storage, process)
        self.watching = follow_watched(functools.partial(look_at_watched, self.database), self)  # type: ignore[arg-type]
        self.watching._every_s = LOOK_S
        self.streams = Streams(100)
        self.viewing: set[asyncio.Task[bool]] = set()

    def is_in_force(self, _owner: str) -> bool:
        return True


class Chains:
    """One run."""

    def __init__(self, world: World, address: str, *, faults: int, jobs: int, kinds: Sequence[str]) -> None:
        chance = world.random
        self.kinds = kinds
        self.world, self.address, self.faults = world, address, faults
        self.storage, self.media = Bucket(world), Media(world.loop)
        self.database_is_away = self.answers_are_lost = self.decoders_fail = False
        self.settings = ServiceSettings(
            database=address,
            storage="storage",
            model="m",
            concurrency=chance.choice((1, 2)),
            jobs=SETTINGS,
            reliability=RELIABILITY,
        )
        self.databases: list[DatabaseOfProcess] = []
        self.client = self.opening = Process(world.loop, "client")
        self.store = JobStore(self.connect(self.client), SETTINGS)
        self._numbers = 0
        self.workers = [self.start_worker() for _ in range(chance.choice((1, 1, 2)))]
        self.ingresses = [self.start_ingress() for _ in range(chance.choice((1, 1, 2)))]
        self.count = jobs
        self.jobs: list[Job] = []
        self.submitted: dict[str, float] = {}
        self.cancelled: set[str] = set()
        self.deleted: set[str] = set()
        self.stories: dict[str, Story] = {}
        self.files: dict[str, bytes] = {}  # The finished videos, as they were when their jobs ended.
        self.begun: list[tuple[float, str]] = []  # When segments of which job were begun.
        self.made: dict[tuple[str, int], list[Made]] = defaultdict(list)  # By job and seed.
        self.troubles: list[tuple[float, float, str]] = []  # Each fault: from when to when, and what.
        self.forgotten: dict[str, float] = {}  # When files of a job were lost.
        self.viewers: list[Viewer] = []
        self.problems: list[str] = []

    def connect(self, process: Process) -> DatabaseOfProcess:
        self.databases.append(DatabaseOfProcess(self.address, self, process))  # type: ignore[arg-type]
        return self.databases[-1]

    def start_worker(self) -> tuple[Process, asyncio.Task[None]]:
        self._numbers += 1
        process = Process(self.world.loop, f"worker {self._numbers}")

        async def work() -> None:
            await JobWorker(process.name, await asyncio.to_thread(self._open, process)).run()

        return process, self.world.loop.create_task(work())

    def start_ingress(self) -> Ingress:
        self._numbers += 1
        return Ingress(self, Process(self.world.loop, f"ingress {self._numbers}"))

    def _open(self, process: Process) -> WorkerContext:
        while True:
            self.opening = process
            try:
                return WorkerContext(self.settings, Engine(self, process), Snapshots(), pictures=False)  # type: ignore[arg-type]
            except StoreUnavailable:
                self.world.loop.block(1.0)

    # ---- a run

    async def live(self) -> None:
        chance = self.world.random
        for _ in range(self.faults):
            self.world.later(chance.uniform(0, FAULTS_S), self._break)
        async with asyncio.timeout(LASTS_S):
            await asyncio.gather(*(self._client(number) for number in range(self.count)))
        self.database_is_away = self.answers_are_lost = self.storage.is_down = self.storage.is_full = False
        self.storage.seconds = 0.02
        for _, task in self.workers:
            task.cancel()
        await asyncio.wait([task for _, task in self.workers])
        await asyncio.sleep(TIDY_S)
        await asyncio.to_thread(self._check)

    async def _client(self, number: int) -> None:
        """Ask for a video, and perhaps for a segment of it once more, and for one of that."""
        chance = self.world.random
        await asyncio.sleep(chance.uniform(0, 8))
        job: Job | None = await self._submit(number)
        while job is not None:
            job = await self._follow(job)

    async def _follow(self, job: Job) -> Job | None:
        """Watch a job a few times, and perhaps cancel or delete it; return one that makes a segment of it again."""
        chance, again = self.world.random, None
        viewing = [asyncio.create_task(self._watch(job)) for _ in range(chance.choice((0, 1, 1, 2)))]
        often, soon_s = (0.1, 15) if job.remixed_from is None else (0.5, 4)
        if chance.random() < often:
            await asyncio.sleep(chance.uniform(0, soon_s))
            self.cancelled.add(job.id)
            await self._insist(self.store.cancel, job.id)
        while not (ended := await self._insist(self.store.get, job.id)).has_ended:
            await asyncio.sleep(2.0)
        if ended.status == "completed":
            self.files[job.id] = self.storage.content.get(ended.results["video"], b"")
            if list_segments(ended)[0] and chance.random() < 0.6:
                again = await self._redo(ended)
        if chance.random() < (0.3 if again is None else 0.5):
            self.deleted.add(job.id)
            with contextlib.suppress(JobNotFound):  # The answer to an earlier try was lost.
                await self._insist(self.store.delete, job.id)
            await asyncio.to_thread(self._sweep)
        await asyncio.gather(*viewing)
        return again

    async def _submit(self, number: int) -> Job:
        chance = self.world.random
        prompts = [f"{number}.{index}" for index in range(chance.choice((1, 1, 2, 3, 4)))]
        if chance.random() < 0.15:
            prompts[chance.randrange(len(prompts))] = "unlike"
        plan = MODEL.plan(GenerationRequest(prompt=prompts[0], seed=100 * number))
        fields = plan.request.to_json() | {"model": "m", "seconds": None, "loras": []}
        motion = len(prompts) > 1 and chance.random() < 0.6
        if prompts[1:]:
            fields |= {"next_prompts": prompts[1:], "added_frames": 4} | ({"continue_by": "motion"} if motion else {})
        job = Job(owner=chance.choice(OWNERS), request=fields, model="m")
        story, inputs, seen = Story(b"", [], [], []), dict[str, bytes](), list[bytes]()
        if chance.random() < 0.2:  # It continues a video.
            source = story.source = make_part(f"source {number}", 0)
            fields |= {"source_frames": 4, "input_size": "1x1"}
            job.input_image, job.input_video = f"inputs.{number}.png", f"inputs.{number}.mp4"
            inputs |= {job.input_image: encode_picture(source), job.input_video: source}
            seen = [source[-3:]]
        elif chance.random() < 0.4:
            self._add_references(number, fields, story, inputs)
        retention = Retention(self.store._database, BucketOfProcess(self.storage, self.client), SETTINGS)  # type: ignore[arg-type]
        for name, content in inputs.items():
            await self._insist(self._reserve, retention, name)
            self.storage.content[name] = content
        for index, prompt in enumerate(prompts):
            looks = story.looks if index == 0 or motion else []
            story.parts.append(make_part(prompt, 100 * number + index, *looks, *seen))
            seen = [story.parts[-1][-3:]]
            story.ends += seen
        return await self._send(job, story)

    def _add_references(self, number: int, fields: dict[str, Any], story: Story, inputs: dict[str, bytes]) -> None:
        chance = self.world.random
        fields |= {"references": [], "reference_files": []}
        for kind in chance.choices(("image", "video"), k=chance.choice((1, 2))):
            name, content = f"inputs.{number}.{len(story.looks)}", chance.randbytes(3 if kind == "image" else 200)
            fields["references"].append({"kind": kind, "height": 1, "width": 1})
            fields["reference_files"].append(name)
            story.looks.append(content)
            inputs[name] = encode_picture(content) if kind == "image" else content

    async def _redo(self, source: Job) -> Job:
        """Ask for a segment of a finished job once more."""
        chance, before = self.world.random, self.stories[source.id]
        # The first one can't be made again if it begins with an image.
        number = chance.randint(1 + (source.input_image is not None), len(before.parts))
        take = Take(f"again {number}", number, chance.randrange(10**6, 10**9))
        assert take.segment is not None and take.seed is not None
        drafts = Drafts(self.settings, MODEL, None, None)  # type: ignore[arg-type] # A remix reads no other inputs.
        caller = Caller(owner=source.owner, sees=source.owner, room=Room(), priority=0, rate={})
        job = drafts.draft_remix(source, take, caller)
        begin = before.ends[number - 2 : number - 1] if number > 1 else []
        goal = [GOAL.encode() + before.ends[number - 1]] if number < len(before.parts) else []
        parts = [*before.parts]
        parts[number - 1] = make_part(take.prompt, take.seed, *before.looks, *begin, *goal)
        return await self._send(job, dataclasses.replace(before, parts=parts))

    async def _send(self, job: Job, story: Story) -> Job:
        self.stories[job.id] = story
        send = functools.partial(self.store.submit, job, shared=job.inputs if job.remixed_from else ())
        while True:
            try:
                await asyncio.to_thread(send)
                break
            except CommitUncertain:
                break
            except StoreUnavailable:
                await asyncio.sleep(1.0)
        self.jobs.append(job)
        self.submitted[job.id] = self.world.loop.time()
        return job

    def _reserve(self, retention: Retention, name: str) -> None:
        with self.store._database.read() as session:
            known = session.get(File, name) is not None
        if not known:
            retention.reserve(name, "", 1)

    async def _watch(self, job: Job) -> None:
        chance = self.world.random
        await asyncio.sleep(chance.uniform(0, 15))
        leaves_s = chance.uniform(1, 10) if chance.random() < 0.2 else None
        while True:
            ingress = chance.choice(self.ingresses)
            viewer = Viewer(job, self.world.loop.time())
            viewing = self.world.loop.create_task(self._view(ingress, viewer))
            ingress.viewing.add(viewing)
            with contextlib.suppress(asyncio.CancelledError):  # Its ingress was killed: the client asks another one.
                if leaves_s is not None:
                    await asyncio.wait([viewing], timeout=leaves_s)
                    viewing.cancel()
                    await asyncio.wait([viewing])
                    return
                if await viewing:
                    self.viewers.append(viewer)
                return

    async def _view(self, ingress: Ingress, viewer: Viewer) -> bool:
        """Watch a job; return whether the ingress had it."""
        while True:
            try:
                job = await asyncio.to_thread(ingress.store.get, viewer.job.id)
                break
            except StoreUnavailable:
                await asyncio.sleep(1.0)
            except JobNotFound:
                return False
        if job.has_ended:
            return False
        seen = Watched(status=job.status, attempts=job.attempts, fragments=job.fragments)
        chunks = watching_module._read_video(ingress, job.id, seen, job.owner)  # type: ignore[arg-type]
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    viewer.received += chunk
        except (DownloadCut, StorageError) as error:
            viewer.cut = str(error)
        viewer.end_s = self.world.loop.time()
        return True

    async def _insist(self, call: Any, *args: Any) -> Any:
        while True:
            try:
                return await asyncio.to_thread(call, *args)
            except StoreUnavailable:
                await asyncio.sleep(1.0)

    def _sweep(self) -> None:
        storage: Any = BucketOfProcess(self.storage, self.client)
        with contextlib.suppress(StoreUnavailable):
            Retention(self.store._database, storage, SETTINGS).sweep()

    # ---- faults

    def _break(self) -> None:
        chance, world = self.world.random, self.world
        kind, now, lasts_s = chance.choice(self.kinds), world.loop.time(), chance.uniform(1, 25)
        name = ""
        if kind in ("worker", "stop", "earlier"):
            at = chance.randrange(len(self.workers))
            process, task = self.workers[at]
            name, lasts_s = process.name, 0.0
            if kind == "stop":
                task.cancel()
            else:
                process.dead = True
            if kind == "earlier":
                world.loop.create_task(self._insist(self._give_back, name))
            self.workers[at] = self.start_worker()
        elif kind == "ingress":
            at, lasts_s = chance.randrange(len(self.ingresses)), 0.0
            ingress, self.ingresses[at] = self.ingresses[at], self.start_ingress()
            ingress.process.dead = True
            for viewing in ingress.viewing:
                viewing.cancel()
        elif kind == "clock":
            lasts_s, step_s = 0.0, chance.choice((-20.0, -5.0, 5.0, 60.0))
            world.loop.wall_offset_s += step_s
            name = f"{step_s:+g} s"
        elif kind == "slow":
            self._change(self.storage, "seconds", 10.0, 0.02, lasts_s)
        else:
            owner, attribute = {
                "decoder": (self, "decoders_fail"),
                "database": (self, "database_is_away"),
                "answers": (self, "answers_are_lost"),
                "down": (self.storage, "is_down"),
                "full": (self.storage, "is_full"),
                "ffmpeg": (self.media, "fails"),
            }[kind]
            self._change(owner, attribute, True, False, lasts_s)
        world.tell(f"{kind} {name} for {lasts_s:.0f} s")
        self.troubles.append((now, now + lasts_s, name if kind in ("worker", "stop", "earlier") else kind))

    def _give_back(self, worker: str) -> None:
        """Give a lost worker's jobs back as an earlier version does, which lets files expire that it doesn't know.

        One file of each job is removed before the job is claimed again.
        """
        with self.store._database.write() as session:
            mine = (Job.status == "in_progress") & (Job.worker == worker) & Job.stop_code.is_(None)
            for job in session.scalars(select(Job).where(mine)):
                job.status, job.worker, job.lease_token, job.lease_expires_at = "queued", None, None, None
                expire_files(session, job.id, self.store._database.now(session) + SETTINGS.abandoned_s)
                if own := sorted(set(job.needed_files) - set(job.inputs)):
                    gone = File.name == self.world.random.choice(own)
                    session.execute(update(File).where(gone).values(delete_at=self.store._database.now(session)))
                    self.forgotten[job.id] = self.world.loop.time()
        self._sweep()

    def _change(self, owner: object, name: str, value: object, back: object, lasts_s: float) -> None:
        setattr(owner, name, value)
        self.world.later(lasts_s, functools.partial(setattr, owner, name, back))

    # ---- what must hold

    def _check(self) -> None:
        self._sweep()
        kept = set()
        for job in self.jobs:
            expected, redo = self.stories[job.id].video, read_redo(job.request)
            with contextlib.suppress(JobNotFound):
                job = self.store.get(job.id)
                released = redo.files if redo is not None and job.status == "failed" else ()
                kept |= {*job.results.values(), *(set(job.inputs) - set(released))}
                if job.status == "failed" and not (job.error_code == "cancelled" and job.id in self.cancelled):
                    self.problems.append(f"{job.id} has failed: {job.error_code}: {job.error_message}")
                elif job.status not in ("completed", "failed"):
                    self.problems.append(f"{job.id} has not ended")
                elif job.status == "completed" and self.storage.content.get(job.results["video"]) != expected:
                    self.problems.append(f"{job.id} has lost its video")
            if self.files.get(job.id, expected) != expected:
                self.problems.append(f"{job.id} has become another video")
            if redo is not None and any(id == job.id and seed != redo.seed for id, seed in self.made):
                self.problems.append(f"{job.id} has made a segment that it shares")
        if wrong := kept ^ set(self.storage.content):
            self.problems.append(f"left in storage, or lacking there: {sorted(wrong)}")
        self.problems += self._check_repeats()
        for viewer in self.viewers:
            self.problems += self._check_viewer(viewer)
        if not self.troubles:
            self.problems += self._check_turns()
        self._check_expiry()

    def _check_expiry(self) -> None:
        """Nothing is left of jobs that have expired."""
        self.world.loop.wall_offset_s += SETTINGS.ended_s + 1
        self._sweep()
        with self.store._database.read() as session:
            rows = [row for table in (Job, File, FileShare, StoredFragment) for row in session.query(table)]
        if rows or self.storage.content:
            self.problems.append(f"left after all jobs have expired: {sorted(self.storage.content)}, {rows}")

    def _check_repeats(self) -> Iterator[str]:
        """A finished segment is made again only if its worker, or its access to the database, was lost before."""
        for (job, seed), times in self.made.items():
            for first, second in itertools.pairwise(times):
                # It was lost with its worker before it was stored, or with the access to the database.
                stored_s = first.end_s + (40 if {"slow", "down", "full"} & self._list_troubles(first.end_s) else 2)
                lost = any(what == first.worker and begin <= stored_s for begin, _, what in self.troubles)
                lost |= first.end_s <= self.forgotten.get(job, -1.0) <= second.begin_s
                if not lost and not {"database", "answers", "clock"} & self._list_troubles(first.end_s, second.begin_s):
                    yield f"{job}: the segment of seed {seed} was made again at {second.begin_s:.1f}: {first}"

    def _list_troubles(self, since_s: float, until_s: float | None = None) -> set[str]:
        """Return what failed at a time, or within an interval."""
        until_s = since_s if until_s is None else until_s
        return {what for begin, end, what in self.troubles if begin <= until_s and end >= since_s - 5}

    def _check_viewer(self, viewer: Viewer) -> Iterator[str]:
        """A viewer has the file's bytes, or what it has is cut for a reason."""
        job, got = viewer.job, viewer.received
        got = got.removeprefix(watching_module.FTYP).replace(FREE, b"")
        expected = self.stories[job.id].video
        if not expected.startswith(got) or (viewer.cut is None and got != expected):
            yield f"{job.id}: a viewer got {got.hex()}, not {expected.hex()} ({viewer.cut})"
        if viewer.cut is None or job.id in self.cancelled | self.deleted or self.troubles:
            return
        refusals = [at for at in self.media.refusals if viewer.begin_s <= at <= viewer.end_s]
        if not refusals or not got:
            yield f"{job.id}: a viewer was cut without a reason after {len(got)} bytes: {viewer.cut}"
        elif viewer.end_s > refusals[-1] + 2:
            yield f"{job.id}: a viewer was cut late, at {viewer.end_s:.1f}, refused at {refusals[-1]:.1f}: {viewer.cut}"

    def _check_turns(self) -> Iterator[str]:
        """While a job waits for its first segment, another owner begins only a few of its own."""
        owners, places = {job.id: job.owner for job in self.jobs}, self.settings.concurrency * len(self.workers)
        for job in self.jobs:
            begin = next((at for at, id_ in self.begun if id_ == job.id), None)
            earlier = [
                other for other in self.jobs
                if other.owner == job.owner and self.submitted[other.id] < self.submitted[job.id]
            ]  # fmt: skip
            if begin is None or earlier:
                continue
            others = [at for at, id_ in self.begun if owners[id_] != job.owner and self.submitted[job.id] < at < begin]
            if len(others) > places + 1:
                yield f"{job.id} waited while another owner began {len(others)} segments in {places} places"


class Snapshots:
    """A worker's snapshots, of which this engine has none."""

    def list_stems(self) -> list[str]:
        return []

    def clean(self) -> None:
        pass


def simulate_chains(
    seed: int, folder: Path, empty: Path, *, faults: int | None = None, jobs: int = 2, kinds: Sequence[str] = FAULTS
) -> Result:
    """Run one service to its end.

    Args:
        seed: Decides everything that happens.
        folder: Where the database and the workers' files are.
        empty: A database file that has only the schema.
        faults: How many there are; None for a random number.
        jobs: The number of jobs.
        kinds: The kinds of faults.
    """
    address = str(shutil.copy(empty, folder / "jobs.sqlite"))
    for ending in ("-wal", "-shm"):
        Path(f"{address}{ending}").unlink(missing_ok=True)
    with virtual_time() as loop, pytest.MonkeyPatch.context() as patch:
        world = World(loop, seed)
        service: Chains | None = None
        patch.setattr(job_worker, "_LOOK_S", 2.0)
        patch.setattr(held_bytes, "LIMIT_BYTES", HELD_BYTES)
        patch.setattr(maintenance, "_SWEEP_S", 1000.0)
        patch.setattr(maintenance, "_ORPHANS_S", 1000.0)
        patch.setattr(tempfile, "tempdir", str(folder))
        for module in (watching_module, content_module):
            patch.setattr(module, "run_in_threadpool", asyncio.to_thread)

        async def live() -> None:
            nonlocal service
            count = world.random.choice((0, 1, 2)) if faults is None else faults
            service = Chains(world, address, faults=count, jobs=jobs, kinds=kinds)
            service.media.install(patch)
            opened = service
            patch.setattr(worker_context, "open_database", lambda _: opened.connect(opened.opening))
            patch.setattr(worker_context, "open_storage", lambda _: BucketOfProcess(opened.storage, opened.opening))
            await service.live()

        try:
            loop.run_until_complete(live())
        except (Stuck, TimeoutError, RuntimeError) as error:
            if service is None or (isinstance(error, RuntimeError) and not loop.blocked):
                raise
            service.problems += [f"blocked: {where}" for where in loop.blocked] or [f"it never ends: {error!r}"]
        assert service is not None
        for database in service.databases:
            database.close()
        return Result(seed, jobs, service.problems, world.story)
