"""An event loop whose time is virtual, with threads that are greenlets: a run is one thread, and the same every time.

Code under test is unchanged: it sleeps, sets time-outs, waits in executors and reads clocks as always. Where nothing is
ready, time jumps to what is due next. A function in an executor runs in a greenlet; a stand-in that takes time there
calls `VirtualTime.block`, which lets the loop go on meanwhile. The same call from the loop itself would stop it, in
production for real seconds: that is an error here.
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

START_S = 1_790_000_000.0  # What the clock on the wall shows when a run begins.


class Stuck(AssertionError):
    """Somebody waits, and nothing will ever happen."""


class LoopBlocked(AssertionError):
    """A call that takes time was made from the event loop, not from a thread."""


class _Task(asyncio.tasks._CTask):  # type: ignore[name-defined, misc]
    """Has a hash that doesn't depend on where it lies in memory: sets of tasks are walked in the same order always."""

    _number = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        _Task._number += 1
        self._hash = _Task._number
        super().__init__(*args, **named)

    def __hash__(self) -> int:
        return self._hash


class VirtualTime(asyncio.BaseEventLoop):
    """The loop. `wall_offset_s`: what somebody has set the clock on the wall by."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.wall_offset_s = 0.0
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._hub = greenlet.getcurrent()
        self.blocked: list[str] = []  # where a call that takes time was made from the loop
        self.forsaken: list[greenlet.greenlet] = []  # threads of processes that were killed: they never go on
        self.set_task_factory(lambda loop, coro, **named: _Task(coro, loop=loop, **named))
        self.set_exception_handler(lambda loop, context: None)  # tasks of killed processes are never looked at

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._due, (when, next(self._numbers), timer))
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _write_to_self(self) -> None:
        pass  # Nothing has to be woken by another thread.

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is passed over when it is due

    def _run_once(self) -> None:
        """Run what is ready; where nothing is, let time jump to what is due next."""
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
        """Have the thread that calls this wait."""
        if seconds > 0:
            self.call_later(seconds, self._thread().switch)
            self._hub.switch()

    def wait_for_ever(self) -> None:
        """Never let the thread that calls this go on."""
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
    """Threads that wait for something, at most so long."""

    def __init__(self, loop: VirtualTime) -> None:
        self._loop = loop
        self._threads: dict[greenlet.greenlet, asyncio.TimerHandle] = {}

    def wait(self, seconds: float) -> None:
        """Wait so long, or until `wake`."""
        thread = self._loop._thread()
        self._threads[thread] = self._loop.call_later(max(0.0, seconds), self._resume, thread)
        self._loop._hub.switch()

    def wake(self) -> None:
        """Let all go on."""
        for thread, timer in self._threads.items():
            timer.cancel()
            self._loop.call_soon(thread.switch)
        self._threads.clear()

    def _resume(self, thread: greenlet.greenlet) -> None:
        self._threads.pop(thread, None)
        thread.switch()


class Lane:
    """A lock of threads, first come first served."""

    def __init__(self, loop: VirtualTime) -> None:
        self._loop = loop
        self._held = False
        self._waiting: deque[greenlet.greenlet] = deque()

    def __enter__(self) -> None:
        if self._held:
            self._waiting.append(self._loop._thread())
            self._loop._hub.switch()
        self._held = True

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._loop.call_soon(self._waiting.popleft().switch)
        else:
            self._held = False


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualTime]:
    """Give a loop, by whose time this process's clocks go until the block ends."""
    loop = VirtualTime()
    before = time.time, time.monotonic
    time.time = lambda: START_S + loop.now + loop.wall_offset_s
    time.monotonic = loop.time
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()  # First, so that what tasks leave unfinished isn't handed to the loop.
        _end_tasks(loop)
        loop._due.clear()
        loop.forsaken.clear()
        time.time, time.monotonic = before


def _end_tasks(loop: VirtualTime) -> None:
    """End what a run has left in the midst of its work, such as processes that were killed.

    Garbage collection would do so at any time later, and warn of coroutines that clean up where no loop runs any more.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None  # What cleans up needs the loop, and fails.
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            for task in sorted(asyncio.all_tasks(loop), key=hash):
                with contextlib.suppress(Exception):
                    task.get_coro().close()  # type: ignore[union-attr]
    finally:
        sys.unraisablehook = hook
