"""A finished file as an HTTP answer: the whole or a part, and nothing again for those who have it."""

import re
from collections.abc import AsyncIterator

from fastapi import Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from actors.storage.base import Storage

CHUNK = 1 << 20  # bytes in memory at a time
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})", re.ASCII)


async def send(
    request: Request, storage: Storage, name: str, media_type: str, filename: str, url_s: float | None = None
) -> Response:
    """Return what is stored under a name; names are never written twice, so the name is the ETag.

    One range is honoured (RFC 9110); several, or none that makes sense, bring the whole. With `url_s` who asks is sent
    to where it is stored, if there is such an address. Raises `Missing`.
    """
    if url_s is not None and (url := await run_in_threadpool(storage.url, name, url_s, filename)) is not None:
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
    first = await run_in_threadpool(storage.read, name, start, min(stop, start + CHUNK))  # raises before the answer
    return StreamingResponse(_chunks(storage, name, first, start, stop), status, headers, media_type)


def _part(first: str, last: str, *, size: int) -> tuple[int, int]:
    """Return [start, stop) of a range; empty where there is nothing."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1 if last else size)


async def _chunks(storage: Storage, name: str, first: bytes, start: int, stop: int) -> AsyncIterator[bytes]:
    yield first
    for at in range(start + CHUNK, stop, CHUNK):
        yield await run_in_threadpool(storage.read, name, at, min(stop, at + CHUNK))
