"""An event loop with virtual time whose threads are greenlets. A run uses one real thread and is deterministic.

The code under test is unchanged: it sleeps, sets time-outs, waits in executors and reads clocks as always. When nothing
is ready, time jumps to the next scheduled event. A function in an executor runs in a greenlet. A stand-in that takes
time there calls `VirtualTime.block`, and the loop goes on meanwhile. It is an error to call that from the loop itself,
because in production the loop would then stop for real seconds.
"""

import asyncio
import contextlib
import heapq
import itertools
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import greenlet

START_S = 1_790_000_000.0  # The wall clock's time when a run begins.


class Stuck(AssertionError):
    """Something is waiting although nothing will ever happen."""


class LoopBlocked(AssertionError):
    """A call that takes time was made from the event loop instead of a thread."""


class _Task(asyncio.tasks._CTask):  # type: ignore[name-defined, misc]
    """A task whose hash doesn't depend on its address, so that sets of tasks are always iterated in the same order."""

    _number = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        _Task._number += 1
        self._hash = _Task._number
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._hash


class VirtualTime(asyncio.BaseEventLoop):
    """The event loop. `wall_offset_s` is the number of seconds by which the wall clock was adjusted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.wall_offset_s = 0.0
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._hub = greenlet.getcurrent()
        self.blocked: list[str] = []  # The places where a call that takes time was made from the loop.
        self.forsaken: list[greenlet.greenlet] = []  # Threads of killed processes, which never continue.
        self.set_task_factory(lambda loop, coro, **options: _Task(coro, loop=loop, **options))
        self.set_exception_handler(lambda loop, context: None)  # Nobody awaits the tasks of killed processes.

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._due, (when, next(self._numbers), timer))
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _write_to_self(self) -> None:
        pass  # There is no other thread that would have to wake the loop.

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # A cancelled timer is skipped when it is due.

    def _run_once(self) -> None:
        """Run everything that is ready. If nothing is, let time jump to the next scheduled event."""
        ready = self._ready  # type: ignore[attr-defined]
        while not ready:
            if not self._due:
                raise Stuck("nothing is ready, and nothing is due")
            when, _, timer = heapq.heappop(self._due)
            if not timer.cancelled():
                self.now = max(self.now, when)
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run a function in a thread of this world."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except StopIteration as error:
                future.set_exception(RuntimeError(f"raised {error!r}"))
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        thread = greenlet.greenlet(run, self._hub)
        self.call_soon(thread.switch)
        return future

    def block(self, seconds: float) -> None:
        """Make the calling thread wait."""
        if seconds > 0:
            self.call_later(seconds, self._thread().switch)
            self._hub.switch()

    def wait_for_ever(self) -> None:
        """Make the calling thread wait for ever."""
        self.forsaken.append(self._thread())
        self._hub.switch()

    def _thread(self) -> greenlet.greenlet:
        thread = greenlet.getcurrent()
        if thread is self._hub:
            self.blocked.append("".join(traceback.format_stack(limit=8)))
            self.stop()
            raise LoopBlocked("a call that takes time was made from the event loop; make it in a thread")
        return thread


class Waiting:
    """Threads that wait for something, each with a time limit."""

    def __init__(self, loop: VirtualTime) -> None:
        self._loop = loop
        self._threads: dict[greenlet.greenlet, asyncio.TimerHandle] = {}

    def wait(self, seconds: float) -> None:
        """Wait for that long, or until `wake` is called."""
        thread = self._loop._thread()
        self._threads[thread] = self._loop.call_later(max(0.0, seconds), self._resume, thread)
        self._loop._hub.switch()

    def wake(self) -> None:
        """Wake all waiting threads."""
        for thread, timer in self._threads.items():
            timer.cancel()
            self._loop.call_soon(thread.switch)
        self._threads.clear()

    def _resume(self, thread: greenlet.greenlet) -> None:
        self._threads.pop(thread, None)
        thread.switch()


class Lane:
    """A lock for threads, granted in the order of arrival."""

    def __init__(self, loop: VirtualTime) -> None:
        self._loop = loop
        self._is_held = False
        self._waiting: deque[greenlet.greenlet] = deque()

    def __enter__(self) -> None:
        if self._is_held:
            self._waiting.append(self._loop._thread())
            self._loop._hub.switch()
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._loop.call_soon(self._waiting.popleft().switch)
        else:
            self._is_held = False


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualTime]:
    """Yield a loop. Until the block ends, this process's clocks show the loop's time."""
    loop = VirtualTime()
    before = time.time, time.monotonic
    time.time = lambda: START_S + loop.now + loop.wall_offset_s
    time.monotonic = loop.time
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()  # Closed first, so that unfinished tasks can't schedule anything on the loop.
        _end_tasks(loop)
        loop._due.clear()
        loop.forsaken.clear()
        time.time, time.monotonic = before


def _end_tasks(loop: VirtualTime) -> None:
    """End the unfinished tasks of a run, such as those of killed processes.

    Garbage collection would end them at some later time, and warn about coroutines that clean up without a loop.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None  # Clean-up code fails without the loop.
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            for task in sorted(asyncio.all_tasks(loop), key=hash):
                with contextlib.suppress(Exception):
                    task.get_coro().close()  # type: ignore[union-attr]
    finally:
        sys.unraisablehook = hook
