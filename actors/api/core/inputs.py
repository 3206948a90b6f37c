"""Open the images and videos that a body contains, or that it names by URL or id, and fit them to its video."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from actors.api.core.access import Caller
from actors.api.core.bodies import ParsedBody
from actors.api.core.create_video import MediaReference
from actors.api.core.errors import HttpError
from actors.api.core.receiving import IncomingRequest
from actors.api.fair_semaphore import Work
from actors.api.outbound.client import FetchSettings, fetch
from actors.api.untrusted.body_parts import CLIP, MEDIUM, PICTURE
from actors.api.untrusted.reader import Reader, Reading
from actors.api.untrusted.references import IMAGE, REFERENCES, VIDEO, name_reference
from actors.jobs.errors import JobNotFound
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.shown import Fit
from wan_tpu.media.video_content import VideoContent
from wan_tpu.plan import RequestPlan
from wan_tpu.reference import SECONDS, SOUNDTRACK, Reference, open_reference
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.base import Missing, Storage

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class OpenInput:
    """An image or a video in a process that has read it."""

    reading: Reading
    name: str  # The file's name there.
    incoming: IncomingRequest  # The request that the bytes count for.

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.reading.sizes[self.name]

    async def fit(self, plan: RequestPlan, spec: ModelSpec) -> bytes:
        """Return an image as a PNG in a video's size, or the first frames of a video as an mp4."""
        request, fit, add = plan.request, _fit_to(plan, spec), self.incoming.add
        if self.name == VIDEO:
            return await self.reading.cut_video(fit, request.frames, step=spec.frame_step, count=add)
        return await self.reading.make_picture(fit, self.name, count=add)

    async def convert(self, plan: RequestPlan, spec: ModelSpec) -> tuple[bytes, int, bytes]:
        """Return a whole video in a plan's size and rate, its number of frames, and its last frame as a PNG."""
        return await self.reading.convert_video(_fit_to(plan, spec), plan.request.fps, count=self.incoming.add)


@dataclasses.dataclass(frozen=True)
class OpenReference:
    """A reference in a process that has read it."""

    reading: Reading
    name: str  # The file's name there.
    incoming: IncomingRequest  # The request that the bytes count for.
    said: MediaReference  # What its author says about it.

    async def fit(
        self, plan: RequestPlan, spec: ModelSpec, work: Work, *, locks_sound: bool
    ) -> tuple[bytes, Reference]:
        """Return it as a PNG, an mp4 or a wav, and its measures, which `work` takes.

        Args:
            locks_sound: Whether a sound is the video's own.
        """
        is_kind = self.reading.kinds[self.name]
        kind = self.said.kind or is_kind
        if kind != is_kind and (kind, is_kind) != ("audio", "video"):
            raise InvalidRequest(
                f"a reference that was sent as {kind} can't be read as one; if its file is of kind {is_kind}, say so",
                REFERENCES,
            )
        height, width = original = self.reading.sizes[self.name]
        if kind != "audio":
            height, width = spec.fit_reference(plan.request, kind, original)
        seconds: float = SECONDS
        if kind == "audio" and locks_sound:  # A second more shows that the sound is cut.
            kind, seconds = SOUNDTRACK, plan.request.frames / plan.request.fps + 1
        content = await self.reading.make_reference(
            self.name,
            "audio" if kind == SOUNDTRACK else kind,
            height,
            width,
            with_sound=self.said.with_sound,
            seconds=seconds,
            count=self.incoming.add,
        )
        if kind == "image":
            return content, Reference(kind, None, *original)
        # Its rate and its length are those of what is stored, which this program has encoded: the client's own file is
        # read only in the process for it.
        measured = await work.run(self.incoming.key, open_reference, kind, VideoContent(content))
        if kind == "video":
            measured = dataclasses.replace(measured, height=original[0], width=original[1])
        return content, dataclasses.replace(measured, source=None)


def _fit_to(plan: RequestPlan, spec: ModelSpec) -> Fit:
    return Fit(plan.request.height, plan.request.width, spec.shape_slack)


def check_completed(job: Job, field: str | None = None) -> None:
    """Raise `HttpError` about a field if a job can't be used because it hasn't completed."""
    if job.status != "completed":
        instead = "send another" if job.has_ended else "ask again when it has completed"
        message = f"{job.id} is {job.status}, and only completed videos can be used; {instead}"
        raise HttpError(400, message, code="video_not_ready", param=field)


class Inputs:
    """Opens the files of bodies, and finds the finished videos that they name by their ids."""

    def __init__(
        self, fetching: FetchSettings, reader: Reader, transfers: Work, store: JobStore, storage: Storage
    ) -> None:
        self._fetching, self._reader, self._transfers = fetching, reader, transfers
        self._store, self._storage = store, storage

    @contextlib.asynccontextmanager
    async def open(
        self, body: ParsedBody, name: str, incoming: IncomingRequest, caller: Caller
    ) -> AsyncIterator[OpenInput | None]:
        """Open the file of a field: it came with the body, is fetched from a URL, or is a video of this service.

        Yields:
            The file; None if the field has none.

        Raises:
            InvalidRequest: It can't be fetched or read.
            HttpError: This service has no such video.
        """
        reference = getattr(body.fields, name)
        if body.reading is not None and name in body.reading.uploads:
            yield OpenInput(body.reading, name, incoming)
        elif reference is None:
            yield None
        elif name == VIDEO and reference.id is not None:
            async with self._open_finished(reference.id, incoming, caller) as reading:
                yield OpenInput(reading, VIDEO, incoming)
        else:
            url = reference.video_url if name == VIDEO else reference.image_url
            async with self._fetch(url, name, "video" if name == VIDEO else "image", incoming) as reading:
                with _name_field(name):
                    yield OpenInput(reading, VIDEO if name == VIDEO else IMAGE, incoming)

    @contextlib.asynccontextmanager
    async def open_reference(
        self, body: ParsedBody, index: int, incoming: IncomingRequest
    ) -> AsyncIterator[OpenReference]:
        """Open one of a body's references, as `open`."""
        assert body.fields.input_references is not None
        said = body.fields.input_references[index]
        if said.url is None or said.kind is None:  # Whoever sends a URL says what it is.
            assert body.reading is not None
            yield OpenReference(body.reading, name_reference(index), incoming, said)
            return
        async with self._fetch(said.url, REFERENCES, said.kind, incoming) as reading:
            yield OpenReference(reading, name_reference(0), incoming, said)

    async def find(self, video: str, caller: Caller) -> Job:
        """Return a completed job of the caller's; raises `HttpError`."""
        try:
            job = await asyncio.to_thread(self._store.get, video, caller.sees)
        except JobNotFound as error:
            raise HttpError(400, str(error), code="video_not_found", param=VIDEO) from None
        check_completed(job, VIDEO)
        return job

    async def locate(self, job: Job, *variants: str, owner: str) -> list[str]:
        """Return the names of results of a job in storage; raises `HttpError` where it hasn't one."""
        await self._look(self._storage.size, job, *variants, owner=owner)
        return [job.results[variant] for variant in variants]

    async def _look(self, look: Callable[[str], T], job: Job, *variants: str, owner: str) -> list[T]:
        """Return what a function returns for results of a job, by their names; raises `HttpError`."""
        if missing := [variant for variant in variants if variant not in job.results]:
            message = (
                f"{job.id} has no {missing[0]}: it was made by an earlier version, or that picture couldn't be made; "
                "send its file as video instead"
            )
            raise HttpError(400, message, code="video_not_ready", param=VIDEO)
        names = [job.results[variant] for variant in variants]
        try:
            return await self._transfers.run(owner, lambda: [look(name) for name in names])
        except Missing:
            message = f"{job.id} no longer exists: it was deleted, or has expired"
            raise HttpError(400, message, code="video_not_found", param=VIDEO) from None

    @contextlib.asynccontextmanager
    async def _fetch(self, url: str, name: str, kind: str, incoming: IncomingRequest) -> AsyncIterator[Reading]:
        fetching, reader = dataclasses.replace(self._fetching, subject=kind), self._reader
        if name in (VIDEO, REFERENCES):
            fetching = dataclasses.replace(fetching, max_bytes=reader.limits.video_bytes)
        async with contextlib.AsyncExitStack() as stack:
            with _name_field(name), incoming.open_file() as content:
                async with reader.fetches.take_turn(incoming.key), incoming.guard_fetch():
                    await fetch(url, fetching, content, owner=incoming.key)
                content_type = {VIDEO: CLIP, REFERENCES: MEDIUM}.get(name, PICTURE)
                reading = await stack.enter_async_context(reader.read(content_type, content, incoming.key))
            yield reading

    @contextlib.asynccontextmanager
    async def _open_finished(self, video: str, incoming: IncomingRequest, caller: Caller) -> AsyncIterator[Reading]:
        job = await self.find(video, caller)
        [size] = await self._look(self._storage.size, job, "video", owner=caller.owner)
        most = self._reader.limits.video_bytes
        if size > most:
            message = (
                f"{job.id} has {size} bytes, but an input video may have at most {most}; send a part of it as a file"
            )
            raise InvalidRequest(message, VIDEO)
        incoming.add(size)
        [content] = await self._look(self._storage.read, job, "video", owner=caller.owner)
        async with contextlib.AsyncExitStack() as stack:
            with incoming.open_file() as file:
                file.write(content)
                reading = await stack.enter_async_context(self._reader.read(CLIP, file, incoming.key))
            yield reading


@contextlib.contextmanager
def _name_field(name: str) -> Iterator[None]:
    """Raise errors of a fetched file with the name of its field."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(str(error), name if error.field in (IMAGE, None) else error.field) from None
