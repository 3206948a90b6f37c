"""Send a video while it is decoded: its fragments, in order, as they are stored."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from actors.api.http.content import CHUNK, DownloadCut, TimedResponse, read_chunks
from actors.api.http.error_answers import HttpError
from actors.api.http.service import Service
from actors.api.variants import VARIANTS
from actors.jobs.errors import JobNotFound, StoreUnavailable
from actors.jobs.tables import Job, StoredFragment
from actors.jobs.watching import Watched, begin_to_watch, list_fragments
from wan_tpu.media.boxes import FREE, list_boxes, shift_samples
from wan_tpu.storage.base import OpenFile

_AGAIN_S = 1.0  # Pause before the database is asked again.
# An empty box is sent after so long a silence. Many proxies cut an answer that brings nothing for a minute.
_SILENCE_S = 25.0
_LONGEST_HEAD = 16_000_000  # More than the index of any video of this service.


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
    }
    if request.scope.get("head"):
        return Response(None, 200, headers, media_type)
    if job.watched_at is None:
        await asyncio.to_thread(begin_to_watch, service.database, job.id)
    seen = Watched(status=job.status, attempts=job.attempts, fragments=job.fragments)
    chunks = _read_video(service, job.id, seen, owner)
    return TimedResponse(chunks, service.settings.limits.download_stall_s, 200, headers, media_type)


async def _read_video(service: Service, job: str, seen: Watched, owner: str) -> AsyncGenerator[bytes, None]:
    sent: list[str] = []  # The digests of the fragments.
    empty_bytes, before = 0, None
    try:
        async with service.watching.follow(job, seen, owner, idle_s=_SILENCE_S) as news:
            async for state in news:
                if state is before:
                    empty_bytes += len(FREE)
                    yield FREE
                    continue
                before = state
                if state.status == "failed":
                    raise DownloadCut("the job has failed")
                if state.status == "completed" and not sent:  # Its fragments may never have been stored.
                    files = [await asyncio.to_thread(_name_result, service, job)]
                else:
                    fragments = await _list(service, job) if state.fragments is not None else []
                    follow = _continue(sent, state, fragments)
                    files = [fragment.name for fragment in follow]
                    sent += [fragment.digest for fragment in follow]
                for name in files:
                    with contextlib.closing(await run_in_threadpool(service.storage.open, name)) as file:
                        # Fragments say where their frames are from their own beginning on, a file from the answer's.
                        head = b"" if sent or not empty_bytes else await run_in_threadpool(_read_head, file)
                        async with contextlib.aclosing(read_chunks(file, shift_samples(head, empty_bytes))) as chunks:
                            async for chunk in chunks:
                                yield chunk
    except (JobNotFound, HttpError) as error:  # The job was deleted, or the key revoked.
        raise DownloadCut(str(error)) from None


def _read_head(file: OpenFile) -> bytes:
    """Return the beginning of an mp4, at least up to its frames."""
    head = bytearray()
    while len(head) < _LONGEST_HEAD and not any(box.kind == b"mdat" for box in list_boxes(head)):
        if not (chunk := file.read(CHUNK)):
            break
        head += chunk
    return bytes(head)


def _continue(sent: list[str], state: Watched, fragments: list[StoredFragment]) -> list[StoredFragment]:
    """Return which fragments come next.

    Args:
        sent: The digests of the fragments that were sent.
        state: The job.
        fragments: All fragments of its latest run.

    Raises:
        DownloadCut: What was sent can't be continued.
    """
    if sent and state.fragments is None:
        raise DownloadCut("a fragment could not be stored")
    # After a loss the video is decoded again, which normally gives the same bytes.
    if any(digest != fragment.digest for digest, fragment in zip(sent, fragments, strict=False)):
        raise DownloadCut("the video was decoded again, with other bytes")
    if state.has_ended and not (len(fragments) >= len(sent) and fragments[-1].attempt == state.attempts):
        raise DownloadCut("the attempt that finished the job stored no fragments")
    return fragments[len(sent) :]


async def _list(service: Service, job: str) -> list[StoredFragment]:
    while True:
        try:
            return await asyncio.to_thread(list_fragments, service.database, job)
        except StoreUnavailable:
            await asyncio.sleep(_AGAIN_S)


def _name_result(service: Service, job: str) -> str:
    return service.store.get(job).results["video"]
