"""Call a slice from its leader's event loop: calls run in threads, and each failure's type says whose fault it is.

Some failures can't be attributed at once; `FailureTracker` counts them.
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

from actors.errors import (
    InputLost,
    MachineFailed,
    PipelineError,
    RequestFailed,
    StageFailed,
    StageInterrupted,
    StageQueuedTooLong,
)
from actors.observe.span import Start
from actors.slices.messages import HostProgress
from cluster.errors import CallFailed, SliceLost
from cluster.gang.protocol import LANES, Lane
from cluster.gang.slice import Returned, Slice
from wan_tpu.errors import CompileFailed, DoesNotFit, InvalidRequest, OutputError, Unavailable, UnhealthyResult

THREADS = 32  # Each lane of the hosts takes one at a time, so that health checks never wait for requests.
# Methods of hosts that read files whose paths come from a request.
READING_FILES = ("check_adapters", "fetch_adapters", "fetch_text_adapters", "prepare_encode")
T = TypeVar("T")
HANG_FACTOR = 20.0  # A call counts as hung when it takes this many times as long as the fastest of its kind.
# Only for the latest kinds of calls is the fastest time remembered, because requests may have any number of sizes.
MAX_KINDS = 256
COMPILING_S = 2.0  # What is compiled faster, or loaded from a cache, isn't worth a report.
_LOOK_S = 0.5  # Pause between two looks at whether a call compiles.


class AsyncSlice:
    """A `cluster.gang.slice.Slice` whose calls can be awaited."""

    def __init__(self, slice_: Slice, on_lost: Callable[[SliceLost], StageInterrupted]) -> None:
        """Wrap a slice. When the slice is lost, `on_lost` is called and returns the error to raise."""
        self._slice = slice_
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="slice")
        self._on_lost = on_lost
        self._lanes = {lane: asyncio.Lock() for lane in LANES}
        self._fastest: dict[tuple[str, Hashable], float] = {}  # Seconds of the fastest call of a kind.
        # The task whose call in lockstep compiles, and since when.
        self._compiling: tuple[asyncio.Task[Any] | None, Start] | None = None

    async def call(self, method: str, *args: Any, lane: Lane = "lockstep", kind: Hashable | None = None) -> Returned:
        """Run a method of the hosts, as `Slice.call` does.

        When cancelled, this waits until the call has ended, so that no step runs unattended.

        Args:
            kind: A key shared by calls that take equally long. The method's value must begin with the seconds that it
                spent compiling. A call counts as hung, which ends the slice, if its time without compiling is
                `HANG_FACTOR` times that of the fastest call with the same key.

        Raises:
            RequestFailed: The request is to blame.
            InputLost: A payload is gone.
            StageInterrupted: The slice is gone, or something that all slices share can't be reached.
            MachineFailed: A host's disk or ffmpeg failed on the result.
            StageFailed: It isn't known what is to blame.
        """
        timeouts = self._slice.timeouts
        fastest = None if kind is None else self._fastest.get((method, kind))
        limit_s = timeouts.build_s if fastest is None else max(timeouts.hung_s, HANG_FACTOR * fastest)
        task = asyncio.current_task()
        watch = functools.partial(self._note_progress, task) if lane == "lockstep" else None
        run = functools.partial(self._slice.call, method, *args, lane=lane, timeout_s=limit_s, on_progress=watch)
        try:
            async with self._lanes[lane]:  # Calls don't wait in threads: many may wait for one slow download.
                start = time.monotonic()
                result = await self.run(run)
            if kind is not None:
                self._fastest.pop((method, kind), None)
                self._fastest[method, kind] = min(time.monotonic() - start - result.value[0], fastest or math.inf)
                if len(self._fastest) > MAX_KINDS:
                    del self._fastest[next(iter(self._fastest))]
            return result
        except CallFailed as failed:
            cause = failed.__cause__
            if isinstance(cause, ray.exceptions.RayError):
                raise InputLost(f"{self._slice.name}: {method} can't get its input ({type(cause).__name__})") from None
            raise self._classify(method, cause, fitted=fastest is not None) from None
        finally:
            if self._compiling is not None and self._compiling[0] is task:
                self._compiling = None

    async def find_compiling(self, work: asyncio.Task[Any]) -> Start | None:
        """Wait until work ends, and return None, or until the slice compiles for it: since when, in that case."""
        while not work.done():
            task, since = self._compiling or (None, None)
            if task is work and since is not None and since.elapsed_s >= COMPILING_S:
                return since
            await asyncio.wait([work], timeout=_LOOK_S)
        return None

    def _note_progress(self, task: asyncio.Task[Any] | None, progress: HostProgress) -> None:
        """Note since when the first host compiles for a task. This is called in a thread of the call."""
        self._compiling = None if progress.within_s is None else self._compiling or (task, Start())

    def _classify(self, method: str, cause: BaseException | None, *, fitted: bool) -> PipelineError:
        """Return the error that says what is to blame; `fitted` says that the same kind of call has fit before."""
        # A call that has fit before fits again on a healthy slice, so the request isn't to blame.
        if isinstance(cause, InvalidRequest) and not (isinstance(cause, DoesNotFit) and fitted):
            return RequestFailed(f"{method}: {cause}", "invalid", elsewhere=method in READING_FILES)
        if isinstance(cause, UnhealthyResult):
            return RequestFailed(f"{method}: {cause}", "unhealthy")
        if isinstance(cause, CompileFailed):  # The compiler would reject the program on every slice.
            return RequestFailed(f"{method}: {cause}", "error")
        if isinstance(cause, Unavailable):
            return StageInterrupted(f"{self._slice.name}: {method}: {cause}")
        kind = MachineFailed if isinstance(cause, OutputError) else StageFailed
        return kind(f"{self._slice.name}: {method}: {type(cause).__name__}: {cause}")

    async def side(self, method: str, *args: Any) -> Returned:
        """Run a method in parallel with those in lockstep; otherwise the same as `call`."""
        return await self.call(method, *args, lane="side")

    async def save(self, method: str, *args: Any) -> Returned:
        """Run a method that copies a state out, without waiting for other kinds of calls; otherwise as `call`."""
        return await self.call(method, *args, lane="save")

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run any function in one of the threads; when cancelled, wait for its end. Raises `StageInterrupted`."""
        try:
            return await wait_despite_cancellation(
                asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
            )
        except SliceLost as lost:
            raise self._on_lost(lost) from None


async def wait_despite_cancellation(work: Awaitable[T]) -> T:
    """Wait until work has ended, however often this is cancelled meanwhile, and only then raise the cancellation.

    Serve may cancel a call more than once: for its caller, and again when the stream or the replica is closed.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled |= not task.cancelled()
        except Exception:
            break  # `result` raises the error below.
    if cancelled:
        if not task.cancelled():
            task.exception()  # Marks it as retrieved, since nobody else asks for it.
        raise asyncio.CancelledError
    return task.result()


class FailureTracker:
    """Counts the requests that a slice's stages have failed since they last succeeded.

    A request that fails may itself be to blame, so it is tried elsewhere. A slice on which several requests fail, with
    no success in between, is considered broken and is replaced. Otherwise it would attract every request, because it
    fails so fast. If requests can't be to blame, several failures of a single one are enough.
    """

    def __init__(self, replica: str, attempts: int, replace: Callable[[str], None]) -> None:
        """Count from zero; after `attempts` failures in a row, call `replace` with the reason to replace the slice."""
        self._replica, self._attempts, self._replace = replica, attempts, replace
        self._failing: dict[str, list[str]] = {}  # Keys of requests, by stage.

    @contextlib.contextmanager
    def track(self, stage: str, key: str) -> Iterator[None]:
        """Count the request if the block fails and the slice may be to blame."""
        try:
            yield
        except StageQueuedTooLong:
            raise
        except StageInterrupted as lost:
            lost.replica = self._replica
            if isinstance(lost, StageFailed):
                self._note(stage, key, again=isinstance(lost, MachineFailed))
            raise
        except RequestFailed as failed:
            failed.replica = self._replica
            if failed.code == "unhealthy":
                self._note(stage, key, again=False)
            raise

    def clear(self, stage: str) -> None:
        """Forget a stage's failures, now that it has succeeded."""
        self._failing.pop(stage, None)

    def _note(self, stage: str, key: str, *, again: bool) -> None:
        """Count a failed request. A request that was counted before is counted once more only if `again`."""
        failing = self._failing.setdefault(stage, [])
        if again or key not in failing:
            failing.append(key)
        if len(failing) >= self._attempts:
            self._replace(f"{stage} failed for {', '.join(sorted(set(failing)))} in a row")
