"""What requests hold in memory: bodies as they arrive, images that are fetched, pictures that are made of them.

So many requests of a key at a time, so many bytes in all, and not for ever. Bodies and images are files without a name,
which the processes that read them are given: in memory, since a disk that is written to all the time holds up the
database's commits.
"""

import asyncio
import contextlib
import dataclasses
import io
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import IO, Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request

from actors.api.http.error_answers import HttpError
from actors.api.limits import Limits

_AGAIN_S = 2
_BURST_S = 2.0
_NO_TIME = 0.0  # of a loop's clock: long ago
_KEYS = 1000  # of which is remembered what they have sent, before those that don't send any more are forgotten


@contextlib.contextmanager
def as_file(content: bytes = b"", count: Callable[[int], None] = lambda size: None) -> Iterator[IO[bytes]]:
    """Give a file without a name that has a content; count: called with the size of what is written, and may raise."""
    linux = hasattr(os, "memfd_create")
    descriptor = os.memfd_create("body") if linux else os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)
    with _Counted(descriptor, count) as file:
        file.write(content)
        yield file


class _Counted(io.BufferedRandom):
    """A file that says how much is about to be written."""

    def __init__(self, descriptor: int, count: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(descriptor, "r+b"))
        self._count = count

    def write(self, content: Any) -> int:
        self._count(len(content))
        return super().write(content)


Part = TypeVar("Part")


@dataclasses.dataclass(eq=False)
class Arriving:
    """What one request holds in memory: of whom it is, how many bytes, and until when the rest of its body must come.

    arrived  whether nothing more is on its way, neither of its body nor of an image that it names: while something is,
             it can be given up for others
    """

    bodies: "Bodies"
    key: str
    deadline: float
    size: int = 0
    arrived: bool = False
    given_up: bool = False
    _scope: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[IO[bytes]]:
        """Give the whole body of a request as a file, whose bytes count until the block ends.

        Raises `HttpError`: 413 for a long one, 408 for a slow one, 503 for want of room.
        """
        stream = request.stream()
        with as_file() as body:
            try:
                while part := await self.part(lambda: anext(stream, b""), len):
                    body.write(part)
                self.arrived = True
                body.seek(0)
                yield body
            finally:
                self.size = 0

    @contextlib.contextmanager
    def file(self) -> Iterator[IO[bytes]]:
        """Give a file for an image, whose bytes count from when they are written to when the block ends."""
        written = 0

        def count(size: int) -> None:
            nonlocal written
            written += size
            self.add(size)

        try:
            with as_file(count=count) as file:
                yield file
        finally:
            self.size -= written

    def add(self, size: int) -> None:
        """Count bytes that are about to be held, and make room for them; raises `HttpError` 413, 503."""
        self.bodies.add(self, size)

    @contextlib.asynccontextmanager
    async def fetching(self) -> AsyncIterator[None]:
        """Fetch something in the block; raises `HttpError` 503 where it is given up since others need the room."""
        self.arrived = False
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if not self.given_up:
                raise
            raise _no_room() from None
        finally:
            self._scope, self.arrived = None, True

    async def part(self, receive: Callable[[], Awaitable[Part]], size_of: Callable[[Part], int]) -> Part:
        """Wait for its next part, and count it; raises `HttpError` 408, 413, 503."""
        if self.given_up:
            raise self.bodies.too_slow(self)
        try:
            async with asyncio.timeout_at(self.deadline) as self._scope:
                part = await receive()
                await self.bodies.count(self, size_of(part))
        except TimeoutError:
            raise self.bodies.too_slow(self) from None
        finally:
            self._scope = None
        return part

    def give_up(self) -> None:
        """Have what waits for its next part fail."""
        self.given_up = True
        if self._scope is not None:
            self._scope.reschedule(_NO_TIME)


class Bodies:
    """The requests that this process holds in memory, by the keys that send them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: list[Arriving] = []
        self._paced: dict[str, float] = {}  # until when a key has used what it may send

    @contextlib.contextmanager
    def arriving(self, headers: Headers, key: str) -> Iterator[Arriving]:
        """Give a body that begins to arrive, which counts until the block ends; raises as `check`."""
        self.check(headers, key)
        held = Arriving(self, key, asyncio.get_running_loop().time() + self._limits.body_s)
        self._held.append(held)
        try:
            yield held
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

    def check(self, headers: Headers, key: str) -> None:
        """Raise what is known before anything of a body is there: `HttpError` 413 or 429."""
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._limits.body_bytes:
            raise self._too_long()
        if sum(held.key == key for held in self._held) >= self._limits.bodies:
            raise HttpError(
                429,
                f"{self._limits.bodies} requests of this key are arriving or being read, which is all that are taken "
                "at a time; send their bodies to the end, or fewer at once",
                code="too_many_bodies",
                after_s=_AGAIN_S,
            )

    async def count(self, held: Arriving, size: int) -> None:
        """Count what has arrived of a body, and make room for it; wait where its key sends too fast."""
        held.size += size
        held.deadline += size / self._limits.body_rate
        if held.size > self._limits.body_bytes:
            raise self._too_long()
        self._make_room(held)
        await self._pace(held.key, size)

    def add(self, held: Arriving, size: int) -> None:
        """Count what is held beside a body; raises `HttpError` 413, 503."""
        held.size += size
        if held.size > self._limits.bodies_bytes:
            raise HttpError(
                413, "the request takes more memory than there is; ask for a smaller size", code="too_large"
            )
        self._make_room(held)

    def _make_room(self, held: Arriving) -> None:
        """Have the key that holds most lose its oldest one that still arrives; raises `HttpError` 503."""
        while sum(other.size for other in self._held if not other.given_up) > self._limits.bodies_bytes:
            if (other := self._most_greedy()) is None or other.key == held.key:
                raise _no_room()
            other.give_up()

    def _most_greedy(self) -> Arriving | None:
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

    def too_slow(self, held: Arriving) -> HttpError:
        """Return what is said of a body that hasn't arrived."""
        limits = self._limits
        message = (
            "the body was given up, since others need the room and this key has most of it; send fewer at once"
            if held.given_up
            else f"the body did not arrive within {limits.body_s:g} s and one more for every {limits.body_rate:g} bytes"
        )
        return HttpError(408, message, code="too_slow", headers={"Connection": "close"})


def _no_room() -> HttpError:
    message = "the requests that are being received take all the room that there is for them; try again"
    return HttpError(503, message, code="unavailable", after_s=_AGAIN_S)
