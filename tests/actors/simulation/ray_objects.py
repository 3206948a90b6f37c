"""Stand-ins for Ray's object store and its actors. Both take time, and fail with the processes that own them."""

import asyncio
import types
from collections.abc import Callable, Generator
from typing import Any

from ray.exceptions import ActorDiedError, ObjectLostError

from actors.observe.status_board import StatusBoard
from actors.slices.references import _RefStoreActor
from tests.actors.simulation.virtual_time import VirtualTime
from tests.actors.simulation.world import CALL_S, Process


class Object:
    """A reference to an object in the store, which is lost with the process that owns it."""

    __slots__ = ("is_evicted", "owner", "value")

    def __init__(self, owner: Process | None, value: Any) -> None:
        self.owner, self.value, self.is_evicted = owner, value, False

    @property
    def is_lost(self) -> bool:
        """Whether the object can't be read any more."""
        return self.is_evicted or (self.owner is not None and self.owner.dead)

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(CALL_S).__await__()
        if self.is_lost:
            raise ObjectLostError("00" * 28, None, "")
        return self.value


class Objects:
    """The object store, as one process uses it from its threads."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def get(self, ref: Object) -> Any:
        """Return an object."""
        self._process.loop.block(CALL_S)
        self._process.check_thread()
        if ref.is_lost:
            raise ObjectLostError("00" * 28, None, "")
        return ref.value

    def put(self, value: Any) -> Object:
        """Store an object."""
        self._process.loop.block(CALL_S)
        self._process.check_thread()
        return Object(self._process, value)


class ActorHandle:
    """A handle to an actor. Its methods return awaitables. The actor may not answer for a while, or be dead."""

    def __init__(self, loop: VirtualTime, process: Process, actor: Any) -> None:
        self._loop, self._process, self._actor = loop, process, actor
        self.silent_until_s = 0.0

    def __getattr__(self, name: str) -> "_Method":
        method = _Method(self, getattr(self._actor, name, lambda: None))
        self.__dict__[name] = method
        return method


class _Method:
    __slots__ = ("_function", "_handle")

    def __init__(self, handle: ActorHandle, function: Callable[..., Any]) -> None:
        self._handle, self._function = handle, function

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        handle = self._handle
        future = handle._loop.create_future()
        wait_s = max(CALL_S, handle.silent_until_s - handle._loop.now)
        handle._loop.call_later(wait_s, self._answer, future, args)
        return future

    def _answer(self, future: asyncio.Future[Any], args: tuple[Any, ...]) -> None:
        handle = self._handle
        if handle._process.dead:
            if not future.done():
                future.set_exception(ActorDiedError())
                future.exception()  # Marks the error as retrieved, since the caller may not await the future.
        elif handle.silent_until_s > handle._loop.now:
            handle._loop.call_later(handle.silent_until_s - handle._loop.now, self._answer, future, args)
        else:
            result = self._function(*args)
            if asyncio.iscoroutine(result):
                result = asyncio.ensure_future(result)
                result.add_done_callback(lambda done: future.done() or future.set_result(done.result()))
            elif not future.done():
                future.set_result(result)


class RefStoreActor(_RefStoreActor):
    """The real actor, except for the method that uses Ray."""

    def adopt(self, scope: int, key: str) -> None:
        there = self._scopes.get(scope, {})
        if key in there and not there[key].is_lost:
            there[key] = Object(None, there[key].value)


class StatusHandle(ActorHandle):
    """A handle to the status actor for one process. Reports arrive at once, as long as the process is alive."""

    def __init__(self, board: StatusBoard, process: Process) -> None:
        super().__init__(process.loop, process, board)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            method, *rest = args if name == "report" else (name, *args)
            return None if self._process.dead else getattr(self._actor, method)(*rest)

        method = types.SimpleNamespace(remote=call)
        self.__dict__[name] = method
        return method
