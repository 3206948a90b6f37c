"""A store of references to payloads between two stages: a stage stores a reference and gets a handle for the next.

References don't travel through Serve's calls. As results of a stream they were freed while the receiver still had them
(Ray 2.60: `ReferenceCountingAssertionError`, on a busy machine). As arguments, Ray holds them until the stage ends,
long after the stage has its own copy. So a small actor holds them until nobody needs them. They reach it by a plain
call, for which Ray counts references exactly. Streams and drivers see only handles.

The actor belongs to the driver of the requests, and ends with it, so that the payloads of a killed driver are freed.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any, NewType, Protocol

import ray

from actors.errors import InputLost, StageInterrupted
from cluster.gang.placement import make_restartable

ADOPT_S = 10.0  # Time limit for copying one payload to the store's own node.
MAX_REMEMBERED_SCOPES = (
    10_000  # The number of ended requests that are remembered, to reject payloads of a stage that was cancelled.
)
LATENTS_WAIT_S = 1.0  # How long one call waits for a request's final latents.
DRIVER_CHECK_S = 5.0  # Pause between two checks whether the driver of a request is still alive.

log = logging.getLogger(__name__)


# Identifies a payload that waits for its next stage, in streams that must not carry references. Handles are never
# reused, except those of chunks, so a store that has lost everything in a restart finds nothing under an old handle.
RefHandle = NewType("RefHandle", str)


class ObjectStore(Protocol):
    """Ray's object store, as a leader uses it from a thread."""

    def get(self, ref: Any) -> Any:
        """Return an object."""

    def put(self, value: Any) -> Any:
        """Store an object and return a reference to it."""


class RefStore:
    """One driver's store of references."""

    def __init__(self, actor: Any = None) -> None:
        """Use the given actor to hold the references, or start one."""
        self._actor = make_restartable(_RefStoreActor).remote() if actor is None else actor
        self._numbers = itertools.count()

    def open_scope(self) -> "RequestScope":
        """Return a new request's scope."""
        return RequestScope(self._actor, next(self._numbers))


class RequestScope:
    """Holds one request's references. It is pickled into calls of stages, and closed when the request has ended."""

    def __init__(self, actor: Any, number: int) -> None:
        self._actor, self._number = actor, number

    async def put(self, ref: ray.ObjectRef) -> RefHandle:
        """Store a payload's reference. The caller must keep its own reference until this returns."""
        return RefHandle(await self._actor.put.remote(self._number, [ref]))

    async def put_chunk(self, chunk: int, ref: ray.ObjectRef) -> RefHandle:
        """Store the latents of a chunk of the video as `put` does, in place of any that are there.

        The payload is also copied to the store's node, because a decoder that starts again needs every chunk.
        """
        handle = _name_chunk(chunk)
        await self._actor.put.remote(self._number, [ref], handle)
        self._actor.adopt.remote(self._number, handle)
        return handle

    async def get(self, *handles: RefHandle | None) -> list[ray.ObjectRef | None]:
        """Return the references of some handles, and None for None. They stay valid until the handles are dropped.

        Raises:
            InputLost: The store doesn't have the payload of a handle, or has lost it.
        """
        keys = [handle for handle in handles if handle is not None]
        refs = await self._actor.get.remote(self._number, keys)
        if len(refs) < len(keys):
            raise InputLost(f"{len(keys) - len(refs)} of {len(keys)} payloads are no longer in the object store")
        return [None if handle is None else refs[handle] for handle in handles]

    async def find_chunk(self, chunk: int) -> ray.ObjectRef | None:
        """Return the latents of a chunk of the video, or None until the chunk is denoised.

        Chunks are denoised in order, and a decoder is called once the first one is denoised. So a chunk counts as lost
        if even the previous one is missing.

        Raises:
            InputLost: The store has lost its chunks. The denoiser won't store them again, so waiting is of no use.
        """
        handle, previous = _name_chunk(chunk), _name_chunk(chunk - 1)
        refs = await self._actor.get.remote(self._number, [handle, previous])
        if handle not in refs and previous not in refs:
            raise InputLost(f"the latents of chunk {chunk} are no longer in the object store")
        return refs.get(handle)

    async def expect_latents(self) -> None:
        """Let a decoder wait for the request's final latents in `wait_for_latents`."""
        await self._actor.expect_latents.remote(self._number)

    def offer_latents(self, handle: RefHandle) -> None:
        """Give the final latents to the decoder that expects them, without waiting for the store."""
        self._actor.offer_latents.remote(self._number, handle)

    async def wait_for_latents(self) -> RefHandle | None:
        """Return the final latents; None if they aren't there after `LATENTS_WAIT_S`.

        Raises:
            InputLost: The store has forgotten that they are expected, so waiting is of no use.
        """
        expected, handle = await self._actor.wait_for_latents.remote(self._number, LATENTS_WAIT_S)
        if not expected:
            raise InputLost("no latents are expected; the object store was restarted, or the request has ended")
        return None if handle is None else RefHandle(handle)

    async def check(self) -> None:
        """Raise `StageInterrupted` if the driver is gone, since nobody else waits for this request."""
        try:
            await self._actor.__ray_ready__.remote()
        except ray.exceptions.ActorUnavailableError:
            pass  # The actor may become available again.
        except ray.exceptions.RayActorError:
            raise StageInterrupted("the driver of this request no longer runs") from None

    async def adopt(self, handle: RefHandle) -> None:
        """Copy a payload that is still needed to the store's node, so that it outlives the process that made it."""
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # The payload or the driver may be gone.
            async with asyncio.timeout(2 * ADOPT_S):
                await self._actor.adopt.remote(self._number, handle)

    def drop(self, *handles: RefHandle | None) -> None:
        """Release payloads that nobody needs any more, without waiting for the store."""
        self._actor.drop.remote(self._number, [handle for handle in handles if handle is not None])

    def close(self) -> None:
        """Release all payloads, including any that arrive later, without waiting for the store."""
        self._actor.end.remote(self._number)

    def finish(self) -> None:
        """Note, without waiting, that nobody will resume the request. Snapshots still being saved then get deleted."""
        self._actor.finish.remote(self._number)

    async def is_finished(self) -> bool:
        """Return whether nobody will resume the request."""
        return await self._actor.is_finished.remote(self._number)


def _name_chunk(chunk: int) -> RefHandle:
    return RefHandle(f"chunk {chunk}")


@contextlib.asynccontextmanager
async def watch_driver(scope: RequestScope) -> AsyncIterator[asyncio.Future[None]]:
    """Watch a request's driver while the block runs, because Serve doesn't end a stream whose reader was killed.

    A driver that doesn't answer isn't assumed to be dead.

    Yields:
        A future that raises `StageInterrupted` once the driver is gone.
    """

    async def watch() -> None:
        while True:
            await asyncio.sleep(DRIVER_CHECK_S)
            try:
                async with asyncio.timeout(DRIVER_CHECK_S):
                    await scope.check()
            except StageInterrupted:
                raise
            except Exception as error:
                log.info("a driver doesn't answer: %s", error or type(error).__name__)

    watching = asyncio.create_task(watch())
    try:
        yield watching
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, StageInterrupted):
            if watching.done():
                watching.result()


class _RefStoreActor:
    """The store's process. After a restart by Ray it is empty, and no old handle is mistaken for a new one."""

    def __init__(self) -> None:
        self._scopes: dict[int, dict[str, ray.ObjectRef]] = {}
        self._latents: dict[int, asyncio.Future[str]] = {}  # The final latents' keys, where decoders wait for them.
        self._ended, self._finished = _LatestNumbers(), _LatestNumbers()

    def put(self, scope: int, refs: list[ray.ObjectRef], key: str | None = None) -> str:
        key = key or secrets.token_hex(16)
        if scope not in self._ended:
            self._scopes.setdefault(scope, {})[key] = refs[0]
        return key

    def get(self, scope: int, keys: list[str]) -> dict[str, ray.ObjectRef]:
        refs = self._scopes.get(scope, {})
        return {key: refs[key] for key in keys if key in refs}

    async def adopt(self, scope: int, key: str) -> None:
        """Copy a payload, while other calls are served."""
        ref = self._scopes.get(scope, {}).get(key)
        if ref is None:
            return
        async with asyncio.timeout(ADOPT_S):
            value = await ref
        if key in (refs := self._scopes.get(scope, {})):  # The payload may have been dropped meanwhile.
            refs[key] = ray.put(value)

    def expect_latents(self, scope: int) -> None:
        if scope not in self._ended:
            self._latents[scope] = asyncio.get_running_loop().create_future()

    def offer_latents(self, scope: int, key: str) -> None:
        if (latents := self._latents.get(scope)) is not None and not latents.done():
            latents.set_result(key)

    async def wait_for_latents(self, scope: int, within_s: float) -> tuple[bool, str | None]:
        """Return whether final latents are expected, and their key if they are there in time."""
        if (latents := self._latents.get(scope)) is None:
            return False, None
        await asyncio.wait([latents], timeout=within_s)
        return True, latents.result() if latents.done() else None

    def drop(self, scope: int, keys: list[str]) -> None:
        for key in keys:
            self._scopes.get(scope, {}).pop(key, None)

    def end(self, scope: int) -> None:
        self._scopes.pop(scope, None)
        self._latents.pop(scope, None)
        self._ended.add(scope)

    def finish(self, scope: int) -> None:
        self._finished.add(scope)

    def is_finished(self, scope: int) -> bool:
        return scope in self._finished


class _LatestNumbers:
    """The latest `MAX_REMEMBERED_SCOPES` numbers that were added."""

    def __init__(self) -> None:
        self._numbers: dict[int, None] = {}

    def add(self, number: int) -> None:
        self._numbers[number] = None
        if len(self._numbers) > MAX_REMEMBERED_SCOPES:
            del self._numbers[next(iter(self._numbers))]

    def __contains__(self, number: int) -> bool:
        return number in self._numbers
