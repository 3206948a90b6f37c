"""A finished file as an HTTP answer: the whole or a part, and nothing again for those who have it."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping

from fastapi import Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Send

from wan_tpu.storage.base import OpenFile, Storage, StorageError

CHUNK = 65_536  # Bytes read at a time. A connection holds three of them at most: two that are sent, one to be sent.
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})", re.ASCII)


class DownloadCut(Exception):
    """Half of a file is sent and the rest can't be: its client takes no more, or the storage gives no more."""


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
    """Return what is stored under a name; names are never written twice, so the name is the ETag.

    One range is honoured (RFC 9110); several, or none that makes sense, bring the whole. With `url_s` who asks is sent
    to where it is stored, if there is such an address; not scripts of the page, which may read nothing there. A client
    that takes nothing for `stall_s` is left. Raises `Missing`.
    """
    scripted = "x-requested-with" in request.headers
    if url_s is not None and not scripted:
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
        found = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
        if found is not None and any(found.groups()):
            start, stop = _part(*found.groups(), size=size)
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
        first = await run_in_threadpool(file.read, min(CHUNK, stop - start))  # raises before the answer begins
    except BaseException:
        file.close()
        raise
    return _Download(file, first, stop - start, stall_s, status, headers, media_type)


class _Download(StreamingResponse):
    """Sends an open file and closes it. A client that stops reading is left, so that it holds no memory for ever."""

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
        self._file, self._first, self._size, self._stall_s = file, first, size, stall_s
        super().__init__(self._chunks(), status, headers, media_type)

    async def stream_response(self, send: Send) -> None:
        """Send it; raises `DownloadCut`."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(message)
            except TimeoutError:
                raise DownloadCut(f"the client took nothing for {self._stall_s:g} s") from None

        try:
            await super().stream_response(send_in_time)
        except StorageError as error:
            raise DownloadCut(str(error)) from None
        finally:
            self._file.close()

    async def _chunks(self) -> AsyncIterator[bytes]:
        chunk, left = self._first, self._size
        while chunk and left:
            yield chunk
            left -= len(chunk)
            chunk = await run_in_threadpool(self._file.read, min(CHUNK, left)) if left else b""


def _part(first: str, last: str, *, size: int) -> tuple[int, int]:
    """Return [start, stop) of a range; empty where there is nothing."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1 if last else size)
