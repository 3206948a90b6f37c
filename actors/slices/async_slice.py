"""A slice called from its leader's event loop: in threads, and with failures sorted by whose they are.

Of some failures there is no telling at once: `FailureTracker` counts them.
"""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray

from actors.errors import InputLost, PipelineError, RequestFailed, StageFailed, StageLost, StageWaited
from cluster.errors import CallFailed, SliceLost
from cluster.gang.protocol import GROUPS, Group
from cluster.gang.slice import Returned, Slice
from wan_tpu.errors import CompileFailed, DoesNotFit, InvalidRequest, Unavailable, UnhealthyResult

THREADS = 32  # Each lane of the hosts takes one at a time, so that health checks never wait for requests.
READING_FILES = (
    "check_adapters",
    "fetch_adapters",
    "prepare_encode",
)  # Methods of hosts that read what a request names by its path.
T = TypeVar("T")
HUNG = 20.0  # times the fastest call of its kind
_KINDS = 256  # Kinds of calls whose fastest is remembered, those that were made last; requests choose their sizes.
SICK = 3  # different requests that fail in a row, none succeeding: the slice is replaced


class AsyncSlice:
    """A `cluster.gang.slice.Slice` to be awaited."""

    def __init__(self, slice_: Slice, lost: Callable[[SliceLost], StageLost]) -> None:
        """lost: told that the slice is, returns what to raise."""
        self._slice = slice_
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="slice")
        self._lost = lost
        self._lanes = {group: asyncio.Lock() for group in GROUPS}
        self._fastest: dict[tuple[str, Hashable], float] = {}  # of a kind of call, s

    async def call(self, method: str, *args: Any, group: Group = "lockstep", like: Hashable | None = None) -> Returned:
        """Run a method of the hosts, as `Slice.call` does.

        like  what decides how long it takes, of a method whose value begins with the seconds that it has compiled for:
              one of several alike that takes `HUNG` times as long as the fastest, which compiling doesn't count in, has
              hung, which ends the slice

        Raises `RequestFailed` when it is the request's fault, `InputLost` when a payload is gone, `StageLost` when the
        slice is, or something that all slices share can't be reached, `StageFailed` when there is no telling. When
        cancelled, waits until the call has ended: a step is never left alone.
        """
        timeouts = self._slice.timeouts
        fastest = None if like is None else self._fastest.get((method, like))
        limit_s = timeouts.build_s if fastest is None else max(timeouts.hung_s, HUNG * fastest)
        run = functools.partial(self._slice.call, method, *args, group=group, timeout_s=limit_s)
        try:
            async with self._lanes[group]:  # here, not in a thread: many may wait for one slow download
                start = time.monotonic()
                returned = await self.run(run)
            if like is not None:
                self._fastest.pop((method, like), None)
                self._fastest[method, like] = min(time.monotonic() - start - returned.value[0], fastest or math.inf)
                if len(self._fastest) > _KINDS:
                    del self._fastest[next(iter(self._fastest))]
            return returned
        except CallFailed as failed:
            cause = failed.__cause__
            if isinstance(cause, ray.exceptions.RayError):
                raise InputLost(f"{self._slice.name}: {method} lost its input ({type(cause).__name__})") from None
            raise self._blamed(method, cause, fitted=fastest is not None) from None

    def _blamed(self, method: str, cause: BaseException | None, *, fitted: bool) -> PipelineError:
        """Return what is raised for what a method has raised; fitted: whether one like it has had room before."""
        # What has had room before has it still, on a slice that is well.
        if isinstance(cause, InvalidRequest) and not (isinstance(cause, DoesNotFit) and fitted):
            return RequestFailed(f"{method}: {cause}", "invalid", elsewhere=method in READING_FILES)
        if isinstance(cause, UnhealthyResult):
            return RequestFailed(f"{method}: {cause}", "unhealthy")
        if isinstance(cause, CompileFailed):  # it would be refused everywhere
            return RequestFailed(f"{method}: {cause}", "error")
        if isinstance(cause, Unavailable):
            return StageLost(f"{self._slice.name}: {method}: {cause}")
        return StageFailed(f"{self._slice.name}: {method}: {type(cause).__name__}: {cause}")

    async def side(self, method: str, *args: Any) -> Returned:
        """Run a method beside those in lockstep; the rest as `call`."""
        return await self.call(method, *args, group="side")

    async def save(self, method: str, *args: Any) -> Returned:
        """Run a method that copies a state out, which waits for no other kind of call; the rest as `call`."""
        return await self.call(method, *args, group="save")

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run any function in one of the threads; when cancelled, wait until it has ended. Raises `StageLost`."""
        try:
            return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, function, *args))
        except SliceLost as lost:
            raise self._lost(lost) from None


async def to_the_end(work: Awaitable[T]) -> T:
    """Wait until work has ended, however often this is cancelled meanwhile, which shows then.

    Serve may cancel a call more than once: when its caller does, when the stream or the replica is closed.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled |= not task.cancelled()
        except Exception:
            break  # which `result` raises below
    if cancelled:
        if not task.cancelled():
            task.exception()  # nobody else asks for it
        raise asyncio.CancelledError
    return task.result()


class FailureTracker:
    """The requests that a slice's stages have failed since they last succeeded.

    One that fails may be to blame itself, and is tried elsewhere. A slice on which several fail, and none succeeds in
    between, is taken to be sick: failing takes no time, so it would be given every request.
    """

    def __init__(self, replica: str, replace: Callable[[str], None]) -> None:
        """replica: Serve's name for the slice's leader; replace: told why the slice is to be replaced."""
        self._replica, self._replace = replica, replace
        self._failing: dict[str, set[str]] = {}  # by stage

    @contextlib.contextmanager
    def watching(self, stage: str, key: str) -> Iterator[None]:
        """Note when the block fails under a request, for what may be the slice's fault."""
        try:
            yield
        except StageWaited:
            raise
        except StageLost as lost:
            lost.replica = self._replica
            if isinstance(lost, StageFailed):
                self._note(stage, key)
            raise
        except RequestFailed as failed:
            failed.replica = self._replica
            if failed.code == "unhealthy":
                self._note(stage, key)
            raise

    def end(self, stage: str) -> None:
        """Forget them: the stage has succeeded."""
        self._failing.pop(stage, None)

    def _note(self, stage: str, key: str) -> None:
        failing = self._failing.setdefault(stage, set())
        failing.add(key)
        if len(failing) >= SICK:
            self._replace(f"{stage} failed for {', '.join(sorted(failing))} in a row")
