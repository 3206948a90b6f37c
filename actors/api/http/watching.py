"""Send a video while it is decoded: its fragments, in order, as they are stored."""

import contextlib
from collections.abc import AsyncGenerator, Iterable

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from actors.api.core.errors import HttpError
from actors.api.core.service import Service
from actors.api.http.content import CHUNK, DownloadCut, TimedResponse
from actors.api.variants import VARIANTS
from actors.jobs.errors import JobNotFound
from actors.jobs.tables import Job
from actors.jobs.watching import FragmentRow, StoredRun, Watched
from wan_tpu.media.boxes import FREE, list_boxes, make_box, shift_samples
from wan_tpu.storage.base import Missing, OpenFile, Storage

# An empty box is sent after so long a silence. Many proxies cut an answer that brings nothing for a minute.
_SILENCE_S = 25.0
_LONGEST_HEAD = 16_000_000  # More than the index of any video of this service.
# What ffmpeg's fragments begin with: programs know an mp4 by it, so it precedes empty boxes.
FTYP = make_box(b"ftyp", b"iso5", (512).to_bytes(4), b"iso5", b"iso6", b"mp41")


async def watch(request: Request, service: Service, job: Job, owner: str) -> Response:
    """Return the answer that sends a video that isn't finished yet, from its first fragment to its end.

    The answer begins at once and waits for whatever isn't there. What a client has received is a valid file at any
    time. If it can't be continued with the same pictures, the connection is cut: no answer ends well that isn't whole.

    Args:
        request: The client's request.
        service: The service.
        job: The job, which has not ended.
        owner: The key that watches.
    """
    media_type, ending = VARIANTS["video"]
    headers = {
        "Cache-Control": "no-store",
        "Content-Disposition": f'inline; filename="{job.id}.{ending}"',
        "Content-Security-Policy": "default-src 'none'",
        "X-Accel-Buffering": "no",  # nginx would otherwise collect fragments before it passes them on.
    }
    if request.scope.get("head"):
        response = Response(None, 200, headers, media_type)
        del response.headers["content-length"]  # It would be 0, and nobody knows the video's.
        return response
    seen = Watched(status=job.status, attempts=job.attempts, fragments=job.fragments)
    chunks = _read_video(service, job.id, seen, owner)
    return TimedResponse(chunks, service.settings.limits.download_stall_s, 200, headers, media_type)


async def _read_video(service: Service, job: str, seen: Watched, owner: str) -> AsyncGenerator[bytes, None]:
    place = _Place()
    lead, before = 0, None  # Bytes that were sent before the video; the latest state.
    try:
        async with service.watching.follow(job, seen, owner, idle_s=_SILENCE_S) as news:
            async for state in news:
                if state is before:
                    empty = FREE if lead or place.sent else FTYP + FREE
                    lead += 0 if place.sent else len(empty)
                    yield empty
                    continue
                before = state
                files = _Files(service.storage, place.list_next(state), 0 if place.sent else lead)
                with contextlib.closing(files):
                    while True:
                        async with service.streams.reading.take_turn(owner):
                            chunk = await run_in_threadpool(files.read)
                        if not chunk:
                            break
                        yield chunk
                place.sent += files.read_count
                if files.is_missing and state.has_ended:
                    raise DownloadCut("a file was removed before it was sent")
    except (JobNotFound, HttpError) as error:  # The job was deleted, or the key revoked.
        raise DownloadCut(str(error)) from None


class _Place:
    """Where a viewer is in a video.

    Attributes:
        sent: How many fragments were sent.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._rows: list[FragmentRow] = []  # The run whose fragments were sent last. Its list is shared and may grow,
        self._other: StoredRun | None = None  # A later run that has fewer fragments so far,
        self._same = 0  # and how many of these have the same bytes.

    def list_next(self, state: Watched) -> list[str]:
        """Return the names of the files that come next.

        Raises:
            DownloadCut: The job has failed, or what was sent can't be continued.
        """
        if state.status == "failed":
            raise DownloadCut("the job has failed")
        if state.has_ended and not self.sent:  # Its fragments may never have been stored.
            if state.video is None:
                raise DownloadCut("the job has no video")
            return [state.video]
        if self.sent and state.fragments is None:
            raise DownloadCut("a fragment could not be stored")
        run = state.stored
        if run is not None:
            self._compare(run)
        if state.has_ended and not (
            run is not None and run.rows is self._rows and run.attempt == state.attempts and not run.has_gap
        ):
            raise DownloadCut("the attempt that finished the job stored no fragments")
        if run is None or run.rows is not self._rows:
            return []
        return [row.name for row in run.rows[self.sent :]]

    def _compare(self, run: StoredRun) -> None:
        """Go on with another run once that has as many fragments as were sent, if these have the same bytes.

        After a loss the video is decoded again, which normally gives the same bytes.
        """
        if run.rows is self._rows:
            return
        if run is not self._other:
            self._other, self._same = run, 0
        stop = min(len(run.rows), self.sent)
        if any(self._rows[number].digest != run.rows[number].digest for number in range(self._same, stop)):
            raise DownloadCut("the video was decoded again, with other bytes")
        self._same = stop
        if stop == self.sent:
            self._rows, self._other = run.rows, None


class _Files:
    """Files that are read one after the other, as if they were one. It ends early at one that isn't there any more.

    Attributes:
        read_count: How many were read to their end.
        is_missing: Whether it has ended early.
    """

    def __init__(self, storage: Storage, names: Iterable[str], lead: int = 0) -> None:
        """Read nothing yet.

        Args:
            storage: Where the files are.
            names: Their names there.
            lead: How many bytes of other boxes, the first of them an `ftyp`, the files follow as one mp4.
        """
        self._storage, self._names, self._lead = storage, iter(names), lead
        self._file: OpenFile | None = None
        self.read_count, self.is_missing = 0, False

    def read(self) -> bytes:
        """Return the next bytes: `CHUNK`, unless more is needed to adjust the first ones, and none at the end.

        Raises:
            StorageError: A file can't be read.
        """
        content = self._read(CHUNK)
        if lead := self._lead:
            self._lead = 0
            while len(content) < _LONGEST_HEAD and not any(box.kind == b"mdat" for box in list_boxes(content)):
                if not (more := self._read(CHUNK)):
                    break
                content += more
            content = _follow(content, lead)
        return content

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size and (file := self._open()) is not None:
            if chunk := file.read(size - len(content)):
                content += chunk
            else:
                self.close()
                self.read_count += 1
        return bytes(content)

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> OpenFile | None:
        if self._file is None and not self.is_missing and (name := next(self._names, None)) is not None:
            try:
                self._file = self._storage.open(name)
            except Missing:
                self.is_missing = True
        return self._file


def _follow(head: bytes, lead: int) -> bytes:
    """Return the beginning of an mp4 as it follows `lead` bytes of other boxes, of which the first is its `ftyp`.

    A file says where its frames are from the answer's beginning on; a fragment, from its own.
    """
    first = next(list_boxes(head), None)
    own = first.stop if first is not None and first.kind == b"ftyp" else 0
    return shift_samples(head, lead - own)[own:]
