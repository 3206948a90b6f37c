"""Bodies as they arrive: so many at a time, so many bytes in all, and not for ever.

They are files without a name, which the processes that read them are given: in memory, since a disk that is written to
all the time holds up the database's commits.
"""

import asyncio
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import IO

from starlette.requests import Request

from actors.api.http.error_answers import HttpError
from actors.api.limits import Limits

_AGAIN_S = 2
_BURST_S = 2.0
_KEYS = 1000  # of which is remembered what they have sent, before those that don't send any more are forgotten


@contextlib.contextmanager
def as_file(content: bytes = b"") -> Iterator[IO[bytes]]:
    """Give a file without a name that has a content."""
    linux = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("body"), "w+b") if linux else tempfile.TemporaryFile() as file:
        file.write(content)
        yield file


@dataclasses.dataclass(eq=False)
class _Held:
    key: str
    scope: asyncio.Timeout
    size: int = 0
    arrived: bool = False
    given_up: bool = False


class Bodies:
    """The bodies that this process holds, by the keys that send them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: list[_Held] = []
        self._paced: dict[str, float] = {}  # until when a key has used what it may send

    @contextlib.asynccontextmanager
    async def received(self, request: Request, key: str) -> AsyncIterator[IO[bytes]]:
        """Give the body of a request as a file, which counts until the block ends.

        Raises `HttpError`: 429 for one too many of a key, 413 for a long one, 408 for a slow one, 503 for want of room.
        """
        self.check(request, key)
        limits, loop = self._limits, asyncio.get_running_loop()
        start = loop.time()
        scope = asyncio.timeout_at(start + limits.body_s)
        held = _Held(key, scope)
        self._held.append(held)
        try:
            with as_file() as body:
                try:
                    async with scope:
                        async for part in request.stream():
                            self._count(held, len(part))
                            body.write(part)
                            await self._pace(key, len(part))
                            if not held.given_up:
                                scope.reschedule(start + limits.body_s + held.size / limits.body_rate)
                except TimeoutError:
                    raise self._too_slow(held) from None
                held.arrived = True
                body.seek(0)
                yield body
        finally:
            self._held.remove(held)

    async def _pace(self, key: str, size: int) -> None:
        """Wait where a key sends faster than it may: nothing more is read of its connections then."""
        now, rate = asyncio.get_running_loop().time(), self._limits.key_rate
        until = max(self._paced.get(key, 0.0), now - _BURST_S) + size / rate
        self._paced[key] = until
        if until > now:
            await asyncio.sleep(until - now)
        elif len(self._paced) > _KEYS:
            self._paced = {other: then for other, then in self._paced.items() if then > now - _BURST_S}

    def check(self, request: Request, key: str) -> None:
        """Raise what is known before anything of a body is there."""
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._limits.body_bytes:
            raise self._too_long()
        if sum(held.key == key for held in self._held) >= self._limits.bodies:
            raise HttpError(
                429,
                f"{self._limits.bodies} requests of this key are arriving or being read, which is all that are taken "
                "at a time; send their bodies to the end, or fewer at once",
                code="too_many_bodies",
                headers={"Retry-After": str(_AGAIN_S)},
            )

    def _count(self, held: _Held, size: int) -> None:
        held.size += size
        if held.size > self._limits.body_bytes:
            raise self._too_long()
        while sum(other.size for other in self._held if not other.given_up) > self._limits.bodies_bytes:
            if (other := self._most_greedy()) is None or other.key == held.key:
                raise HttpError(
                    503,
                    "the requests that are being received take all the room that there is for them; try again",
                    code="unavailable",
                    headers={"Retry-After": str(_AGAIN_S)},
                )
            other.given_up = True
            other.scope.reschedule(0.0)  # long ago

    def _most_greedy(self) -> _Held | None:
        """Return the oldest body that still arrives, of the key that holds most bytes."""
        arriving = [held for held in self._held if not held.arrived and not held.given_up]
        return max(
            arriving,
            key=lambda one: sum(held.size for held in self._held if held.key == one.key),
            default=None,
        )

    def _too_long(self) -> HttpError:
        return HttpError(
            413, f"the body has more than {self._limits.body_bytes} bytes; send a smaller image", code="too_large"
        )

    def _too_slow(self, held: _Held) -> HttpError:
        limits = self._limits
        message = (
            "the body was given up, since others need the room and this key has most of it; send fewer at once"
            if held.given_up
            else f"the body did not arrive within {limits.body_s:g} s and one more for every {limits.body_rate:g} bytes"
        )
        return HttpError(408, message, code="too_slow", headers={"Connection": "close"})
