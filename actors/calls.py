"""Calls of a slice from its leader's event loop: in threads, and with failures sorted by whose they are."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from actors.errors import InputLost, RequestFailed, StageLost
from cluster.errors import CallFailed, SliceLost
from cluster.slices import Gang
from wan_tpu.errors import InvalidInput, UnhealthyResult

THREADS = 32  # more than other requests can be here: each waits in one, and a health check must not wait for them


class Calls:
    """A slice's methods (`cluster.slices.Gang`), to be awaited.

    They raise `RequestFailed` when it is the request's fault, `InputLost` when a payload is gone, `StageLost` when the
    slice is.
    """

    def __init__(self, slice_: Gang, together: int, lost: Callable[[SliceLost], StageLost]) -> None:
        """together: requests that it computes at once; lost: told that the slice is, returns what to raise."""
        self._slice = slice_
        self._threads = ThreadPoolExecutor(THREADS + together, thread_name_prefix="slice")
        self._lost = lost

    async def call(self, method: str, *args: Any) -> Any:
        """Return the value of a method run in lockstep."""
        return await self._on_slice(self._slice.call, method, *args)

    async def call_payload(self, method: str, *args: Any) -> Any:
        """Return the value of a method run in lockstep, and a reference to its payload."""
        return await self._on_slice(self._slice.call_payload, method, *args)

    async def side(self, method: str, *args: Any) -> Any:
        """Return the value of a method run beside the calls."""
        return await self._on_slice(self._slice.side, method, *args)

    async def side_payload(self, method: str, *args: Any) -> Any:
        """Return the value of a method run beside the calls, and a reference to its payload."""
        return await self._on_slice(self._slice.side_payload, method, *args)

    async def check(self) -> None:
        """Return if all hosts answer; raises `StageLost`."""
        try:
            await self.run(self._slice.check)
        except SliceLost as lost:
            raise self._lost(lost) from None

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run in a thread; when cancelled, wait until the thread is done: a step is never left alone."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(function, *args))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    async def _on_slice(self, run: Callable[..., Any], method: str, *args: Any) -> Any:
        try:
            return await self.run(run, method, *args)
        except CallFailed as failed:
            cause = failed.__cause__
            if isinstance(cause, ray.exceptions.RayError):
                raise InputLost(f"{self._slice.name}: {method} lost its input ({type(cause).__name__})") from None
            code = "invalid" if isinstance(cause, InvalidInput) else "error"
            code = "unhealthy" if isinstance(cause, UnhealthyResult) else code
            raise RequestFailed(f"{method}: {cause}", code) from None
        except SliceLost as lost:
            raise self._lost(lost) from None
