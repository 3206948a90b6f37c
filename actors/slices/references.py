"""Where references to payloads wait between two stages: a stage leaves one and gets a handle, the next is given it.

References don't travel through Serve's calls. As results of a stream they were freed while the receiver still had them
(Ray 2.60: `ReferenceCountingAssertionError`, on a busy machine), and as arguments Ray holds them
until the stage ends, long after it has its copy. Here a small actor holds them, given by a plain call of which Ray's
count is exact, until nobody needs them. Handles are what streams and drivers see.

The actor belongs to the driver whose requests they are, and ends with it: what a killed driver leaves is freed.
"""

import asyncio
import contextlib
import itertools
import secrets
from typing import Any, NewType, Protocol

import ray

from actors.errors import InputLost, StageLost
from cluster.gang.placement import surviving

ADOPT_S = 10.0  # One payload may take so long to the store's own node.
ENDED = 10_000  # Requests remembered to have ended, so that a stage that was cancelled leaves nothing behind.


# Stands for a payload that waits for its next stage, in streams that must not carry references. Never given twice, so
# that a store which was restarted, and has lost all, finds nothing under it.
RefHandle = NewType("RefHandle", str)


class ObjectStore(Protocol):
    """Ray's object store, as a leader uses it from a thread."""

    def get(self, ref: Any) -> Any:
        """Return an object."""

    def put(self, value: Any) -> Any:
        """Return a reference to an object that the store keeps from now on."""


class RefStore:
    """One driver's store of references."""

    def __init__(self, actor: Any = None) -> None:
        """actor: a handle to the actor that holds them; a new one if None."""
        self._actor = surviving(_RefStoreActor).remote() if actor is None else actor
        self._numbers = itertools.count()

    def scope(self) -> "RequestScope":
        """Return a new request's scope."""
        return RequestScope(self._actor, next(self._numbers))


class RequestScope:
    """Holds one request's references; picklable, stages are given it. To be closed when the request has ended."""

    def __init__(self, actor: Any, number: int) -> None:
        self._actor, self._number = actor, number

    async def put(self, ref: ray.ObjectRef) -> RefHandle:
        """Leave a payload. The caller's reference must hold until this returns."""
        return RefHandle(await self._actor.put.remote(self._number, [ref]))

    async def get(self, *handles: RefHandle | None) -> list[ray.ObjectRef | None]:
        """Return the references of some handles, of None None. They hold until the handles are dropped.

        Raises `InputLost` when one is not there (any more).
        """
        keys = [handle for handle in handles if handle is not None]
        found = await self._actor.get.remote(self._number, keys)
        if len(found) < len(keys):
            raise InputLost(f"{len(keys) - len(found)} of {len(keys)} payloads are not in the store any more")
        refs = iter(found)
        return [None if handle is None else next(refs) for handle in handles]

    async def check(self) -> None:
        """Raise `StageLost` when the driver is gone, and with it everybody who waits for this request."""
        try:
            await self._actor.__ray_ready__.remote()
        except ray.exceptions.ActorUnavailableError:
            pass  # it may come back
        except ray.exceptions.RayActorError:
            raise StageLost("the driver of this request is gone") from None

    async def adopt(self, handle: RefHandle) -> None:
        """Have the store itself own a payload, whose maker goes, in memory of its node; none that nobody needs."""
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # it, or the driver, is gone
            async with asyncio.timeout(2 * ADOPT_S):
                await self._actor.adopt.remote(self._number, handle)

    def drop(self, *handles: RefHandle | None) -> None:
        """Let go of payloads that nobody needs any more; doesn't wait."""
        self._actor.drop.remote(self._number, [handle for handle in handles if handle is not None])

    def close(self) -> None:
        """Let go of all, and of what comes later; doesn't wait."""
        self._actor.end.remote(self._number)

    def finish(self) -> None:
        """Note that nobody will resume the request: what is still being saved of it is in vain; doesn't wait."""
        self._actor.finish.remote(self._number)

    async def is_finished(self) -> bool:
        """Whether nobody will resume the request."""
        return await self._actor.is_finished.remote(self._number)


class _RefStoreActor:
    """Ray may restart it, with nothing in it: what it gave before is lost then, and never taken for something else."""

    def __init__(self) -> None:
        self._scopes: dict[int, dict[str, ray.ObjectRef]] = {}
        self._ended, self._finished = _Latest(), _Latest()

    def put(self, scope: int, refs: list[ray.ObjectRef]) -> str:
        key = secrets.token_hex(16)
        if scope not in self._ended:
            self._scopes.setdefault(scope, {})[key] = refs[0]
        return key

    def get(self, scope: int, keys: list[str]) -> list[ray.ObjectRef]:
        there = self._scopes.get(scope, {})
        return [there[key] for key in keys if key in there]

    async def adopt(self, scope: int, key: str) -> None:
        """Copy a payload; others are given theirs meanwhile."""
        ref = self._scopes.get(scope, {}).get(key)
        if ref is None:
            return
        async with asyncio.timeout(ADOPT_S):
            value = await ref
        if key in (there := self._scopes.get(scope, {})):
            there[key] = ray.put(value)

    def drop(self, scope: int, keys: list[str]) -> None:
        for key in keys:
            self._scopes.get(scope, {}).pop(key, None)

    def end(self, scope: int) -> None:
        self._scopes.pop(scope, None)
        self._ended.add(scope)

    def finish(self, scope: int) -> None:
        self._finished.add(scope)

    def is_finished(self, scope: int) -> bool:
        return scope in self._finished


class _Latest:
    """The latest `ENDED` numbers that were added."""

    def __init__(self) -> None:
        self._numbers: dict[int, None] = {}

    def add(self, number: int) -> None:
        self._numbers[number] = None
        if len(self._numbers) > ENDED:
            del self._numbers[next(iter(self._numbers))]

    def __contains__(self, number: int) -> bool:
        return number in self._numbers
