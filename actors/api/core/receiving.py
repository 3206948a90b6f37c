"""The memory of incoming requests: bodies as they arrive, images that are fetched, and pictures made from them.

The number of requests per key, the bytes in total and the time of a request are limited.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import IO

from starlette.datastructures import Headers
from starlette.requests import Request

from actors.api.core.errors import HttpError
from actors.api.limits import ServiceLimits
from actors.api.token_buckets import TokenBuckets
from actors.api.untrusted.memory_file import open_memory_file

_AGAIN_S = 2
_BURST_S = 2.0
_LONG_AGO = 0.0  # By an event loop's clock.


@dataclasses.dataclass(eq=False)
class IncomingRequest:
    """One request's share of the memory."""

    bodies: "Bodies"  # All requests of this process.
    key: str  # The key that sends the request.
    deadline: float  # When the next part of the body must have arrived, by the event loop's clock.
    size: int = 0
    # Whether nothing more is on its way, neither of the body nor of an image that it names. While something is, the
    # request can be abandoned to make room for others.
    arrived: bool = False
    abandoned: bool = False  # Whether that has happened.
    _scope: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def receive_body(self, request: Request) -> AsyncIterator[IO[bytes]]:
        """Receive a request's body into a file, whose bytes count until the block ends.

        Raises:
            HttpError: 413 for a long body, 408 for a slow one, 503 if there is no room.
        """
        stream = request.stream()
        with open_memory_file() as body:
            try:
                while part := await self._receive_part(stream):
                    body.write(part)
                self.arrived = True
                body.seek(0)
                yield body
            finally:
                self.size = 0

    @contextlib.contextmanager
    def open_file(self) -> Iterator[IO[bytes]]:
        """Open a file for an image. Its bytes count from when they are written until the block ends."""
        nbytes = 0

        def count(size: int) -> None:
            nonlocal nbytes
            nbytes += size
            self.add(size)

        try:
            with open_memory_file(count=count) as file:
                yield file
        finally:
            self.size -= nbytes

    def add(self, size: int) -> None:
        """Count bytes that are about to be allocated, and make room for them; raises `HttpError` 413, 503."""
        self.bodies.add(self, size)

    @contextlib.asynccontextmanager
    async def guard_fetch(self) -> AsyncIterator[None]:
        """Guard a fetch in the block; raises `HttpError` 503 if it is abandoned because others need the room."""
        self.arrived = False
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if not self.abandoned:
                raise
            raise _build_no_room_error() from None
        finally:
            self._scope, self.arrived = None, True

    async def _receive_part(self, stream: AsyncGenerator[bytes, None]) -> bytes:
        """Wait for the next part of the body, and count it; empty at its end. Raises `HttpError` 408, 413, 503."""
        try:
            if self.abandoned:
                raise TimeoutError
            async with asyncio.timeout_at(self.deadline) as self._scope:
                part = await anext(stream, b"")
                await self.bodies.count(self, len(part))
        except TimeoutError:
            raise self.bodies.build_too_slow_error(self) from None
        finally:
            self._scope = None
        return part

    def abandon(self) -> None:
        """Abandon the request: whatever waits for its next part fails."""
        self.abandoned = True
        if self._scope is not None:
            self._scope.reschedule(_LONG_AGO)


class Bodies:
    """All requests that this process holds in memory."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._incoming: list[IncomingRequest] = []
        self._rates = TokenBuckets(_BURST_S)  # Of the bytes of each key.

    @contextlib.contextmanager
    def admit(self, headers: Headers, key: str) -> Iterator[IncomingRequest]:
        """Admit a request whose body begins to arrive. It counts until the block ends. Raises what `check` raises."""
        self.check(headers, key)
        incoming = IncomingRequest(self, key, asyncio.get_running_loop().time() + self._limits.body_s)
        self._incoming.append(incoming)
        try:
            yield incoming
        finally:
            self._incoming.remove(incoming)

    def check(self, headers: Headers, key: str) -> None:
        """Raise `HttpError` 413 or 429 for a body that can be rejected before any of it has arrived."""
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._limits.body_bytes:
            raise self._build_too_long_error()
        if sum(incoming.key == key for incoming in self._incoming) >= self._limits.bodies:
            raise HttpError(
                429,
                f"{self._limits.bodies} requests of this key are being received or read, the most that are accepted "
                "at a time; finish sending them, or send fewer at once",
                code="too_many_bodies",
                after_s=_AGAIN_S,
            )

    async def count(self, incoming: IncomingRequest, size: int) -> None:
        """Count a part of a body that has arrived, and make room for it. Wait if its key sends too fast."""
        incoming.size += size
        incoming.deadline += size / self._limits.body_rate
        if incoming.size > self._limits.body_bytes:
            raise self._build_too_long_error()
        self._make_room(incoming)
        # While this waits, nothing more is read from the key's connections.
        if (wait_s := self._rates.overdraw(incoming.key, size / self._limits.key_rate)) > 0:
            await asyncio.sleep(wait_s)

    def add(self, incoming: IncomingRequest, size: int) -> None:
        """Count memory besides the body; raises `HttpError` 413, 503."""
        incoming.size += size
        if incoming.size > self._limits.bodies_bytes:
            raise HttpError(
                413, "the request needs more memory than is available; ask for a smaller size", code="too_large"
            )
        self._make_room(incoming)

    def _make_room(self, incoming: IncomingRequest) -> None:
        """Abandon the oldest arriving request of the greediest key until there is room; raises `HttpError` 503."""
        while sum(other.size for other in self._incoming if not other.abandoned) > self._limits.bodies_bytes:
            if (other := self._find_greediest()) is None or other.key == incoming.key:
                raise _build_no_room_error()
            other.abandon()

    def _find_greediest(self) -> IncomingRequest | None:
        """Return the oldest request that is still arriving, of the key that holds most bytes."""
        arriving = [incoming for incoming in self._incoming if not incoming.arrived and not incoming.abandoned]
        return max(
            arriving,
            key=lambda candidate: sum(incoming.size for incoming in self._incoming if incoming.key == candidate.key),
            default=None,
        )

    def _build_too_long_error(self) -> HttpError:
        return HttpError(
            413, f"the body has more than {self._limits.body_bytes} bytes; send a smaller image", code="too_large"
        )

    def build_too_slow_error(self, incoming: IncomingRequest) -> HttpError:
        """Return the error for a body that hasn't arrived in time."""
        limits = self._limits
        message = (
            "the body was dropped, because other clients need the memory and this key was using most of it; send "
            "fewer requests at once"
            if incoming.abandoned
            else f"the body did not arrive within {limits.body_s:g} s plus 1 s for every {limits.body_rate:g} bytes"
        )
        return HttpError(408, message, code="too_slow", headers={"Connection": "close"})


def _build_no_room_error() -> HttpError:
    message = "the requests that are being received use all the memory reserved for them; try again"
    return HttpError(503, message, code="unavailable", after_s=_AGAIN_S)
