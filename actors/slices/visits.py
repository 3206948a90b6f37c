"""Track requests on one slice: their places, their arrays on the hosts, their turns on the devices, and their spans."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from actors.errors import RequestFailed, StageInterrupted, StageQueuedTooLong
from actors.observe.span import Span, SpanKind, Start, split_compute
from actors.pipeline_spec import Chips
from actors.slices.async_slice import AsyncSlice, FailureTracker, wait_despite_cancellation
from actors.slices.autoscaling import SliceTime
from actors.slices.drain import DrainState
from actors.slices.handover import PublishedPayloads
from actors.slices.messages import SliceRequest
from actors.slices.scheduler import PriorityQueue, StepScheduler
from actors.slices.snapshots import Snapshotter


@dataclasses.dataclass(frozen=True)
class SliceFacts:
    """Constant facts about a slice: its pool, and what its spans are labelled with.

    Attributes:
        pool: The pool's name.
        stages: The stages that the pool runs.
        name: The leader's name, in spans and messages.
        chips: What the slice is made of.
        snapshot_every: Steps between two snapshots.
        patience_s: How long a request may wait for a place here before it tries another replica; None if the pool has
            only one replica.
    """

    pool: str
    stages: tuple[str, ...]
    name: str
    chips: Chips
    snapshot_every: int
    patience_s: float | None


@dataclasses.dataclass
class Visit:
    """A request on the hosts: the key of its arrays there, and whether they have been taken out already."""

    host_key: str
    is_empty: bool = False


class SliceVisits:
    """The requests that visit one slice.

    Attributes:
        work: The stage and the request of everything that is running or paused.
        scheduler: Decides which request runs next.
        time: How long requests occupy the slice.
        published: Payloads that their next stage may not have fetched yet.
    """

    def __init__(
        self,
        facts: SliceFacts,
        slice_: AsyncSlice,
        snapshotter: Snapshotter,
        drain: DrainState,
        failures: FailureTracker,
        on_work: Callable[[], object],
    ) -> None:
        """Serve a pool's stages. `on_work` is called whenever `work` changes."""
        self._facts, self._slice, self._snapshotter = facts, slice_, snapshotter
        self._drain, self._failures, self._on_work = drain, failures, on_work
        self.work: list[tuple[str, str]] = []
        self.scheduler = StepScheduler()
        self.time = SliceTime()
        self._visits = itertools.count(1)
        self.published = PublishedPayloads(drain)

    @contextlib.contextmanager
    def _serve(self, request: SliceRequest, stage: str) -> Iterator[None]:
        """Keep the leader alive until a stage has ended, and count failures for which the slice may be to blame."""
        with self._drain.keep_leader(), self._failures.track(stage, request.key):
            yield

    @contextlib.asynccontextmanager
    async def _enter_visit(self, request: SliceRequest, places: PriorityQueue) -> AsyncIterator[Visit]:
        """Take a place on the devices for the block. However that ends, the hosts then drop the request's arrays."""
        async with self._take_place(request, places, self._facts.patience_s), self._open_visit(request) as visit:
            yield visit

    @contextlib.asynccontextmanager
    async def _take_place(
        self, request: SliceRequest, places: PriorityQueue, patience_s: float | None = None
    ) -> AsyncIterator[None]:
        """Take a place on the devices for the block; raise `StageQueuedTooLong` if none is free within `patience_s`."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(patience_s):
                    await stack.enter_async_context(places.enter(request.priority, request.arrival_s))
            except TimeoutError:
                raise StageQueuedTooLong(f"{request.key} has waited for a place on {self._facts.name}") from None
            self._drain.check()
            yield

    @contextlib.asynccontextmanager
    async def _open_visit(self, request: SliceRequest) -> AsyncIterator[Visit]:
        """Yield the request's key on the hosts. However the block ends, the hosts then drop the request's arrays.

        Every visit has a key of its own, because a driver that has lost track of a request may send it here again.
        """
        visit = Visit(f"{request.key} {next(self._visits)}")
        try:
            yield visit
        finally:
            await wait_despite_cancellation(self._release(visit))

    async def _release(self, visit: Visit) -> None:
        await self._snapshotter.settle(visit.host_key)
        if not visit.is_empty:
            with contextlib.suppress(StageInterrupted, RequestFailed):
                await self._slice.side("drop", visit.host_key)

    async def _compute(
        self,
        request: SliceRequest,
        stage: str,
        shape: str,
        method: str,
        *args: Any,
        has_begun: asyncio.Event | None = None,
    ) -> tuple[list[Span], tuple[str, ...], Any]:
        """Hold the devices for one call, and set `has_begun` then; return the call's spans, warnings and payload."""
        async with self.scheduler.device.enter(request.priority):
            self._drain.check()
            with self._list_work(request.key, stage):
                start = Start()
                if has_begun is not None:
                    has_begun.set()
                (compile_s, warnings), ref = await self._slice.call(method, *args, kind=shape)
                return self._make_spans(request.key, stage, start, compile_s), tuple(warnings), ref

    def _make_spans(self, key: str, stage: str, start: Start, compile_s: float, step: int | None = None) -> list[Span]:
        """Return the spans of a call that began at `start`, for compiling and for computing."""
        return split_compute(self._make_span(key, stage, "compute", start, step=step), compile_s)

    @contextlib.contextmanager
    def _list_work(self, key: str, stage: str) -> Iterator[None]:
        """List a request in `work` during the block, and measure how long it occupies the slice."""
        self.work.append((stage, key))
        self._on_work()
        try:
            with self.time.measure():
                yield
            self._failures.clear(stage)
        finally:
            self.work.remove((stage, key))
            self._on_work()

    def _make_first_span(self, request: SliceRequest, stage: str, start: Start, nbytes: int) -> Span:
        """Return the span of moving a request's inputs to the devices. It also says why this slice was chosen."""
        fetched = self._make_span(request.key, stage, "fetch", start, nbytes=nbytes)
        return dataclasses.replace(fetched, chosen=self._explain_choice(request))

    def _explain_choice(self, request: SliceRequest) -> str:
        """Return why the router chose this slice, or "" if it gave no reason."""
        return request.choices.get(self._facts.name.removeprefix(f"{self._facts.pool}/"), "")

    def _make_span(
        self, key: str, stage: str, kind: SpanKind, start: Start, *, step: int | None = None, nbytes: int | None = None
    ) -> Span:
        facts, seconds = self._facts, start.elapsed_s
        return Span(
            slice=facts.name,
            request=key,
            stage=stage,
            kind=kind,
            start_s=start.wall_s,
            seconds=seconds,
            step=step,
            nbytes=nbytes,
            pool=facts.pool,
            chips=facts.chips,
        )
