"""Requests on one slice: their places, their arrays on the hosts, their turns on the devices, and their spans."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from actors.errors import RequestFailed, StageLost, StageWaited
from actors.observe.span import Span, SpanKind, Start, split_compute
from actors.pipeline_spec import Chips
from actors.slices.async_slice import AsyncSlice, FailureTracker, to_the_end
from actors.slices.autoscaling import SliceTime
from actors.slices.drain import DrainState
from actors.slices.handover import PublishedPayloads
from actors.slices.messages import SliceRequest
from actors.slices.scheduler import PriorityQueue, StepScheduler
from actors.slices.snapshots import Snapshotter


@dataclasses.dataclass(frozen=True)
class PoolOfSlice:
    """The facts about a slice that don't change: its pool, and what its spans are marked with.

    Attributes:
        pool: The pool's name.
        stages: The stages that the pool runs.
        name: The leader's name, in spans and messages.
        chips: What the slice is made of.
        snapshot_every: Steps between two snapshots.
        patience_s: How long a request may wait for a place here before it looks for another replica; None where the
            pool has no other.
    """

    pool: str
    stages: tuple[str, ...]
    name: str
    chips: Chips
    snapshot_every: int
    patience_s: float | None


@dataclasses.dataclass
class Visit:
    """A request on the hosts: the key of its arrays there, and whether they have been taken out by now."""

    host_key: str
    is_empty: bool = False


class SliceVisits:
    """The requests that visit one slice.

    Attributes:
        work: The stage and the request of everything that is computed or paused.
        scheduler: Decides whose turn it is.
        time: How long requests keep the slice.
        published: Payloads that may still wait for their next stage.
    """

    def __init__(
        self,
        where: PoolOfSlice,
        slice_: AsyncSlice,
        snapshotter: Snapshotter,
        drain: DrainState,
        failures: FailureTracker,
        on_work: Callable[[], object],
    ) -> None:
        """Serve a pool's stages; `on_work` is called whenever `work` has changed."""
        self._where, self._slice, self._snapshotter = where, slice_, snapshotter
        self._drain, self._failures, self._on_work = drain, failures, on_work
        self.work: list[tuple[str, str]] = []
        self.scheduler = StepScheduler()
        self.time = SliceTime()
        self._visits = itertools.count(1)
        self.published = PublishedPayloads(drain)

    @contextlib.contextmanager
    def _serve(self, request: SliceRequest, stage: str) -> Iterator[None]:
        """Keep the leader alive until a stage has ended, and count failures that may be the slice's."""
        with self._drain.keep_leader(), self._failures.track(stage, request.key):
            yield

    @contextlib.asynccontextmanager
    async def _enter_visit(self, request: SliceRequest, places: PriorityQueue) -> AsyncIterator[Visit]:
        """Take a place on the devices; at the end, drop what the hosts hold of the request, however it ends."""
        async with self._take_place(request, places, self._where.patience_s), self._open_visit(request) as visit:
            yield visit

    @contextlib.asynccontextmanager
    async def _take_place(
        self, request: SliceRequest, places: PriorityQueue, patience_s: float | None = None
    ) -> AsyncIterator[None]:
        """Take a place on the devices for the block; raise `StageWaited` if none is free in `patience_s`."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(patience_s):
                    await stack.enter_async_context(places.enter(request.priority, request.came_s))
            except TimeoutError:
                raise StageWaited(f"{request.key} has waited for a place on {self._where.name}") from None
            self._drain.check()
            yield

    @contextlib.asynccontextmanager
    async def _open_visit(self, request: SliceRequest) -> AsyncIterator[Visit]:
        """Yield the request's key on the hosts; at the end, drop what they hold under it, however it ends.

        The key is this visit's alone, because a driver that has lost sight of a request may have sent it here once
        more.
        """
        visit = Visit(f"{request.key} {next(self._visits)}")
        try:
            yield visit
        finally:
            await to_the_end(self._release(visit))

    async def _release(self, visit: Visit) -> None:
        await self._snapshotter.settle(visit.host_key)
        if not visit.is_empty:
            with contextlib.suppress(StageLost, RequestFailed):
                await self._slice.side("drop", visit.host_key)

    async def _compute(
        self,
        request: SliceRequest,
        stage: str,
        shape: str,
        method: str,
        arg: str,
        has_begun: asyncio.Event | None = None,
    ) -> tuple[list[Span], tuple[str, ...], Any]:
        """Keep the devices for one call, which sets `has_begun`; return its spans, warnings and payload."""
        async with self.scheduler.device.enter(request.priority):
            self._drain.check()
            with self._list_work(request.key, stage):
                start = Start()
                if has_begun is not None:
                    has_begun.set()
                (compile_s, warnings), ref = await self._slice.call(method, arg, like=shape)
                return self._make_spans(request.key, stage, start, compile_s), tuple(warnings), ref

    def _make_spans(self, key: str, stage: str, start: Start, compile_s: float, step: int | None = None) -> list[Span]:
        """Return the spans of a call of the slice since `start`: compiling, and computing."""
        return split_compute(self._make_span(key, stage, "compute", start, step=step), compile_s)

    @contextlib.contextmanager
    def _list_work(self, key: str, stage: str) -> Iterator[None]:
        """Have `work` list a request for the block, and count the time that it keeps the slice."""
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
        """Return the span of bringing a request's inputs to the devices, which also says why it came to this slice."""
        fetched = self._make_span(request.key, stage, "fetch", start, nbytes=nbytes)
        return dataclasses.replace(fetched, chosen=self._explain_choice(request))

    def _explain_choice(self, request: SliceRequest) -> str:
        """Return why the router chose this slice; "" where it doesn't say."""
        return request.choices.get(self._where.name.removeprefix(f"{self._where.pool}/"), "")

    def _make_span(
        self, key: str, stage: str, kind: SpanKind, start: Start, *, step: int | None = None, nbytes: int | None = None
    ) -> Span:
        where, seconds = self._where, start.elapsed_s
        return Span(
            slice=where.name,
            request=key,
            stage=stage,
            kind=kind,
            start_s=start.wall_s,
            seconds=seconds,
            step=step,
            nbytes=nbytes,
            pool=where.pool,
            chips=where.chips,
        )
