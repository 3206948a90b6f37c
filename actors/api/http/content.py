"""Send a finished file over HTTP, whole or in part, unless the client has it already."""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Mapping

from fastapi import Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Send

from wan_tpu.storage.base import OpenFile, Storage, StorageError

CHUNK = 65_536  # Bytes read at a time. A connection holds at most three chunks: two being sent, and the next one.
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})", re.ASCII)


class DownloadCut(Exception):
    """The rest of a file can't be sent: the client has stopped reading, or the storage has failed."""


async def send(
    request: Request,
    storage: Storage,
    name: str,
    media_type: str,
    filename: str,
    url_s: float | None = None,
    *,
    stall_s: float,
) -> Response:
    """Return the answer that sends a stored file. Names are never reused, so the name serves as the ETag.

    A single range is honoured (RFC 9110). Several ranges, or an invalid one, get the whole file.

    Args:
        request: The client's request.
        storage: Where the file is.
        name: The file's name there.
        media_type: The file's type.
        filename: The name that the client may save it under.
        url_s: If set, clients are redirected to a signed URL that is valid for that many seconds, if the storage can
            sign URLs. Scripts of the web page aren't redirected, since they can't read from another origin.
        stall_s: A client that reads nothing for this long is disconnected.

    Raises:
        Missing: There is no such file.
    """
    is_script = "x-requested-with" in request.headers
    if url_s is not None and not is_script:
        url = await run_in_threadpool(storage.url, name, url_s, filename)
        if url is not None:
            return RedirectResponse(url, headers={"Cache-Control": "no-store"})
    etag = f'"{name}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, max-age=86400, immutable",
        "Content-Disposition": f'inline; filename="{filename}"',
        "Content-Security-Policy": "default-src 'none'",
    }
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if etag in known or "*" in known:
        return Response(None, 304, headers)
    size = await run_in_threadpool(storage.size, name)
    start, stop, status = 0, size, 200
    if request.headers.get("if-range", etag) == etag:
        match = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
        if match is not None and any(match.groups()):
            start, stop = _parse_range(*match.groups(), size=size)
            if start >= stop:
                return Response(None, 416, headers | {"Content-Range": f"bytes */{size}"})
            status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{size}"
    headers["Content-Length"] = str(stop - start)
    if request.scope.get("head"):
        return Response(None, status, headers, media_type)
    if start == stop:
        return Response(None, status, headers, media_type)
    file = await run_in_threadpool(storage.open, name, start)
    try:
        first = await run_in_threadpool(file.read, min(CHUNK, stop - start))  # Fails, if at all, before the answer.
    except BaseException:
        file.close()
        raise
    return _Download(file, first, stop - start, stall_s, status, headers, media_type)


class TimedResponse(StreamingResponse):
    """Sends what a generator yields. A client that stops reading is disconnected, since its answer occupies memory."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], stall_s: float, status: int, headers: Mapping[str, str], kind: str
    ) -> None:
        self._chunks, self._stall_s = chunks, stall_s
        super().__init__(chunks, status, headers, kind)

    async def stream_response(self, send: Send) -> None:
        """Send everything; raises `DownloadCut`."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(message)
            except TimeoutError:
                raise DownloadCut(f"the client received nothing for {self._stall_s:g} s") from None

        try:
            await super().stream_response(send_in_time)
        except StorageError as error:
            raise DownloadCut(str(error)) from None
        finally:
            await self._chunks.aclose()


class _Download(TimedResponse):
    """Sends a part of an open file and closes it."""

    def __init__(
        self,
        file: OpenFile,
        first: bytes,
        size: int,
        stall_s: float,
        status: int,
        headers: Mapping[str, str],
        media_type: str,
    ) -> None:
        self._file = file
        super().__init__(read_chunks(file, first, size), stall_s, status, headers, media_type)

    async def stream_response(self, send: Send) -> None:
        """Send the file; raises `DownloadCut`."""
        try:
            await super().stream_response(send)
        finally:
            self._file.close()


async def read_chunks(file: OpenFile, first: bytes = b"", size: int = sys.maxsize) -> AsyncGenerator[bytes, None]:
    """Yield the rest of an open file in chunks.

    Args:
        file: The file.
        first: The bytes that were read already.
        size: The most bytes to yield, including those of `first`.
    """
    chunk = first or await run_in_threadpool(file.read, min(CHUNK, size))
    while chunk:
        yield chunk
        size -= len(chunk)
        chunk = await run_in_threadpool(file.read, min(CHUNK, size)) if size else b""


def _parse_range(first: str, last: str, *, size: int) -> tuple[int, int]:
    """Return [start, stop) of a range; empty if the file has no such part."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1 if last else size)
