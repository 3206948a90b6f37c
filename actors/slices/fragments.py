"""Fragments of a video on their way from the host that encodes it to the driver that follows the request.

The encoder never waits. Its fragments stay on the host until the leader takes them, in a lane of their own, while the
hosts decode; all of them together are as large as the finished file.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from actors.errors import StageInterrupted
from actors.slices.async_slice import AsyncSlice, wait_despite_cancellation
from actors.slices.messages import EncodedFragment

# A call of the host waits so long for the next fragment. It also delays the end of a request that is cancelled.
WAIT_S = 1.0
T = TypeVar("T")


@dataclasses.dataclass
class _Queue:
    """Fragments that the leader hasn't taken, and whether no more will follow."""

    fragments: list[bytes] = dataclasses.field(default_factory=list)
    is_over: bool = False


class FragmentQueues:
    """The fragments on one host that its leader hasn't taken yet, by the keys of their requests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[str, _Queue] = {}

    def open(self, key: str) -> None:
        """Expect the fragments of a video, or of its next part: any that have come since the last one are kept."""
        with self._changed:
            self._queues.setdefault(key, _Queue()).is_over = False

    @contextlib.contextmanager
    def fill(self, key: str) -> Iterator[Callable[[bytes], None] | None]:
        """Yield the function to call with each fragment, or None if nobody expects any; the block's end ends them.

        The function also takes those of the video's later parts, until `drop`.
        """
        queue = self._queues.get(key)
        if queue is None:
            yield None
            return

        def add(fragment: bytes) -> None:
            with self._changed:
                self._queues.setdefault(key, _Queue()).fragments.append(fragment)
                self._changed.notify_all()

        try:
            yield add
        finally:
            with self._changed:
                queue.is_over = True
                self._changed.notify_all()

    def take(self, key: str) -> tuple[list[bytes], bool]:
        """Wait a while for fragments; return those that are there, and whether others may follow."""
        with self._changed:
            queue = self._queues.get(key)
            if queue is None:
                return [], False
            self._changed.wait_for(lambda: queue.fragments or queue.is_over, WAIT_S)
            if queue.is_over:
                self._queues.pop(key, None)
            fragments, queue.fragments = queue.fragments, []
            return fragments, not queue.is_over

    def drop(self, key: str) -> None:
        """Release the fragments of a video that nobody will take."""
        with self._changed:
            self._queues.pop(key, None)

    def list_keys(self) -> list[str]:
        with self._changed:
            return list(self._queues)


@contextlib.asynccontextmanager
async def run_concurrently(work: Coroutine[Any, Any, T]) -> AsyncIterator["asyncio.Task[T]"]:
    """Run work concurrently with the block, which may await it; if the block fails, cancel it and wait for its end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # The block has got its error, or has its own.
            await wait_despite_cancellation(task)


class FragmentTaker:
    """Takes the fragments of one video, or of a part of it, from its host, while the slice decodes it.

    Attributes:
        has_begun: Set when the decoder has its turn: until then, others use the lane.
    """

    def __init__(self, slice_: AsyncSlice, host_key: str, first: int = 0) -> None:
        """Take nothing yet; `first` is how many fragments of the video were taken before."""
        self._slice, self._host_key = slice_, host_key
        self.index, self._may_follow = first, True
        self.has_begun = asyncio.Event()

    async def take(self, decoding: "asyncio.Task[Any]") -> list[EncodedFragment]:
        """Wait for fragments; return none after the last one, or when `decoding`, the decoder's call, has failed."""
        if not self.has_begun.is_set():
            turn = asyncio.create_task(self.has_begun.wait())
            await asyncio.wait([turn, decoding], return_when=asyncio.FIRST_COMPLETED)
            turn.cancel()
        contents: list[bytes] = []
        while self._may_follow and not contents and not (decoding.done() and decoding.exception()):
            try:
                outcome = await self._slice.call("take_fragments", self._host_key, lane="stream")
            except StageInterrupted:
                await decoding  # Its own error says more.
                raise
            contents, self._may_follow = outcome.value
        first, self.index = self.index, self.index + len(contents)
        return [EncodedFragment(index, content) for index, content in enumerate(contents, first)]
