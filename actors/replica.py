"""A replica of a pool: a small CPU actor that leads one slice and takes requests through its stages.

While the slice computes for one request, or for the pool's `batch` of them, step by step together, the next one's
inputs are fetched and put on the devices, and the results of the one before leave. Every method is a stream: spans as
they end, then one `Handed`. What comes and goes waits on the request's shelf of the `Exchange`; streams carry tickets.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
from ray import serve

from actors.board import Board
from actors.calls import Calls
from actors.embedding_cache import Embedding, EmbeddingCache, embedding_key
from actors.errors import InputLost, RequestFailed, StageLost, StageMoved
from actors.events import Event, Handed, Prepared
from actors.exchange import Shelf, Ticket
from actors.host_values import Plan
from actors.keeping import Keeping
from actors.scaling import LOAD, SliceTime
from actors.settings import PoolSettings
from actors.snapshots import Snapshots
from actors.timeline import Span, What
from actors.together import Together
from actors.turn import Turn
from cluster.draining import draining_for
from cluster.errors import CallFailed, SliceLost
from cluster.slice_spec import SliceSpec
from cluster.slices import Slice
from wan_tpu.errors import InvalidInput
from wan_tpu.request import GenerationRequest, ResolvedRequest

log = logging.getLogger(__name__)

SHAPES = 64  # that a replica is remembered to hold, for routing
FAILED, REFUSED = "failed: ", "refused: "  # how what a replica does begins when it can't start: again, or never
LEAVE_S = 0.5  # between the loss of a slice and the end of its leader: callers are told first
DRIVER_S = 5.0  # between two looks whether anybody still waits for a request
HAND_OVER_S = 5.0  # kept free before a drained slice is taken away, to copy a state out and write it


class PoolReplica:
    """Leads one slice. Serve restarts it when the slice is lost; its callers go on elsewhere."""

    def __init__(self, settings: PoolSettings) -> None:
        """Take a slice, start its hosts, and let them read the weights of the pool's stages."""
        self._settings = settings
        given = settings.pipeline
        self._name = f"{settings.pool}/{serve.get_replica_context().replica_id.unique_id}"
        self._turn = Turn(settings.batch)
        self._lane = asyncio.Lock()  # calls of the slice, in the order in which they come
        snapshots = Snapshots(given.snapshots)
        self._cache = EmbeddingCache.connect(f"{given.name}-embeddings")
        self._board = Board.connect(given.name)
        self._at_work: list[str] = []  # stages of requests
        self._visits = itertools.count(1)
        self._ended = False
        self._leave_by: float | None = None  # of time.monotonic(): the slice is being drained, and taken away then
        self._time = SliceTime()
        start = time.time()
        self._doing(f"takes a {settings.slice} and starts its hosts")
        try:
            self._slice = Slice(
                SliceSpec(settings.slice), given.host, settings.host, name=self._name, timeouts=given.timeouts
            )
            self._calls = Calls(self._slice, settings.batch, self._lost)
            self._keeping = Keeping(self._calls, snapshots)
            self._together = Together(lambda held: self._calls.call("step", held), self._lane)
            self._tell("reads weights")
            self._slice.call("load", on_progress=lambda told: self._tell("reads", told))
            for request in given.warm_up:
                self._tell("compiles")
                self._slice.call("warm_up", request, on_progress=lambda told: self._tell("compiles", told))
        except Exception as error:
            cause = error.__cause__ if isinstance(error, CallFailed) else None
            self._doing(f"{REFUSED}{cause}" if isinstance(cause, InvalidInput) else f"{FAILED}{error}")
            with contextlib.suppress(AttributeError):  # there is none yet
                self._slice.close()
            del self._board  # what it was told stays there, for whoever waits for this pool
            raise
        self._tell("idle")
        log.info("%s leads %s, ready after %.1f s", self._name, self._slice.describe(), time.time() - start)

    # ---- the stages

    async def plan(self, request: GenerationRequest) -> Plan:
        """Return what a request takes of this model. Raises `RequestFailed` when the model can't make it."""
        return await self._calls.side("plan", request)

    async def encode_text(self, key: str, prompt: str, shelf: Shelf) -> AsyncIterator[Event]:
        """Encode a prompt, or find that it has been: one `TextEmbedding`."""
        spans: list[Span] = []

        async def encode() -> tuple[Any, ray.ObjectRef]:
            async with self._between(key, "encoder"):
                start = time.time()
                warnings, ref = await self._calls.call_payload("encode_text", prompt)
                spans.append(self._span(key, "encoder", "compute", start))
                return warnings, ref

        made = await self._cache.get(self._embedding_key(prompt), encode)
        for span in spans:
            yield span
        yield Handed(await shelf.put(made.ref), time.time(), note=made.note)

    async def forget_text(self, prompt: str, lost: Ticket, shelf: Shelf) -> None:
        """Drop an embedding from the cache whose object is lost; if only its ticket is, leave it there."""
        with contextlib.suppress(InputLost):
            [ref] = await shelf.get(lost)
            assert ref is not None
            await self._cache.forget(self._embedding_key(prompt), Embedding(ref, None, cached=True))

    async def encode_image(self, key: str, request: ResolvedRequest, shape: str, shelf: Shelf) -> AsyncIterator[Event]:
        """Encode a request's image: one `ImageCondition`."""
        await self._hold(shape)
        start = time.time()
        async with self._held(key) as held:
            nbytes = await self._calls.side("prepare_encode", held, request)
            yield self._span(key, "encoder", "fetch", start)
            yield Prepared(time.time() - start, nbytes)
            async with self._between(key, "encoder"):
                start = time.time()
                _, ref = await self._calls.call_payload("encode_image", held)
                yield self._span(key, "encoder", "compute", start)
            yield Handed(await shelf.put(ref), time.time())

    async def denoise(
        self,
        key: str,
        plan: Plan,
        inputs: list[Ticket | None],
        *,
        state: Ticket | None,
        kept: str,
        snapshot: int | None,
        shelf: Shelf,
    ) -> AsyncIterator[Event]:
        """Run all steps of this pool's experts: one `DenoiseState`.

        inputs    tickets of prompt, negative prompt or None, image or None
        state     where the pool before has left off
        kept      the name of the request's snapshots; snapshot  the step of the one to go on from

        Raises `StageMoved` when the slice is taken away before the last step could be done, a snapshot taken.
        """
        mine = [expert for expert in plan.experts if expert.stage in self._settings.stages]
        stage = mine[0].stage
        await self._hold(plan.shapes[stage])
        start = time.time()
        async with self._held(key) as held:
            refs = await shelf.get(*inputs, state)
            if snapshot is not None:
                refs[-1] = await self._keeping.load(kept, snapshot)
            nbytes = await self._calls.side("prepare_denoise", held, plan.without_image, *refs)
            del refs  # or the store would keep them until the last step
            yield self._span(key, stage, "fetch", start)
            yield Prepared(time.time() - start, nbytes)
            async with self._busy(key, stage, plan.shapes[stage]), self._together.member(held):
                async for span in self._steps(key, plan, held, kept, snapshot or mine[0].start, shelf):
                    yield span
            start = time.time()
            step, ref = await self._calls.side_payload("collect", held)
            if step < plan.request.steps:
                # The next pool starts from this; if that is lost before its first snapshot, nothing is done twice.
                await self._keeping.keep(kept, step, ref)
            yield self._span(key, stage, "fetch", start)
            yield Handed(await shelf.put(ref), time.time(), step)

    async def _steps(self, key: str, plan: Plan, held: str, kept: str, done: int, shelf: Shelf) -> AsyncIterator[Span]:
        """Run the steps of this pool's experts after the first `done`, a span each."""
        last = max(expert.stop for expert in plan.experts if expert.stage in self._settings.stages)
        asked = time.monotonic()
        while done < last:
            async with self._lane:
                begun: float | None = time.time()
                expert = await self._calls.call("begin", held)
            while done < expert.stop:
                stepped = await self._together.step(held, plan.shapes[expert.stage])
                done = stepped.done.step
                span = self._span(key, expert.stage, "compute", begun or stepped.start_s, done)
                begun = None
                yield span
                if self._must_go((last - done) * span.seconds):
                    await self._together.leave(held)  # the others go on while this one's state is copied out
                    step = await self._keeping.now(held, kept)
                    raise StageMoved(f"{self._name} is being drained; {key} goes on elsewhere after step {step}")
                if done % self._settings.pipeline.snapshot_every == 0 and done < plan.request.steps:
                    self._keeping.beside(held, kept)
                if time.monotonic() > asked + DRIVER_S:  # Serve doesn't end a stream whose reader was killed
                    await shelf.check()
                    asked = time.monotonic()

    async def decode(self, key: str, plan: Plan, state: Ticket, shelf: Shelf) -> AsyncIterator[Event]:
        """Decode final latents: one `EncodedVideo`."""
        await self._hold(plan.shapes["decoder"])
        start = time.time()
        async with self._held(key) as held:
            nbytes = await self._calls.side("prepare_decode", held, plan.without_image, *await shelf.get(state))
            yield self._span(key, "decoder", "fetch", start)
            yield Prepared(time.time() - start, nbytes)
            async with self._between(key, "decoder"):
                start = time.time()
                _, ref = await self._calls.call_payload("decode", held)
                yield self._span(key, "decoder", "compute", start)
            yield Handed(await shelf.put(ref), time.time())

    async def warm_up(self, request: GenerationRequest) -> dict[str, float]:
        """Compile what a request like this needs; return the seconds by program."""
        plan = await self.plan(request)
        async with self._turn.held():
            seconds = await self._calls.call("warm_up", request)
        for stage in self._settings.stages:
            if stage in plan.shapes:
                await self._programs(plan.shapes[stage])
        return seconds

    async def held(self) -> list[str]:
        """Return what the hosts of the slice hold: a request's id, and which visit of it."""
        return await self._calls.side("keys")

    # ---- what Serve asks

    @serve.multiplexed(max_num_models_per_replica=SHAPES)
    async def _programs(self, shape: str) -> str:
        """Hold a shape's programs: Serve then prefers this replica for it."""
        return shape

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve how long requests keep the slice, for `actors.scaling`."""
        return {LOAD: self._time.seconds / self._settings.pipeline.scale_wait_s}

    async def check_health(self) -> None:
        """Leave when the slice is gone, and when it is about to be taken away and nothing runs on it any more."""
        await self._calls.check()
        left = draining_for(host.node_id for host in self._slice.hosts)
        if left is not None and self._leave_by is None:
            self._leave_by = time.monotonic() + left
            self._tell(f"leaving: its hosts are drained in {left:.0f} s")
            log.warning("%s is being drained, %.0f s left", self._name, left)
        if self._leave_by is not None and not self._turn.taken() and not self._lane.locked():
            self._slice.close()
            self._end()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._slice.close()
            self._board.gone(self._name)

    # ----

    async def _hold(self, shape: str) -> None:
        self._check_stays()
        await self._programs(shape)

    def _check_stays(self) -> None:
        if self._leave_by is not None:
            raise StageMoved(f"{self._name} is being drained; another replica takes what comes")

    @contextlib.asynccontextmanager
    async def _held(self, key: str) -> AsyncIterator[str]:
        """Give the name under which the hosts hold a request's arrays, and let go of them, however it ends.

        A name for this time only: somebody who has lost sight of the request may have sent it here once more.
        """
        held = f"{key} {next(self._visits)}"
        try:
            yield held
        finally:
            await self._keeping.settled(held)
            with contextlib.suppress(StageLost, RequestFailed):
                await self._calls.side("drop", held)

    @contextlib.asynccontextmanager
    async def _busy(self, key: str, stage: str, shape: str) -> AsyncIterator[None]:
        """Wait for the turn of this request's steps, and keep it: alone, or with others of the same shape."""
        async with self._turn.held(shape):
            with self._at(key, stage):
                yield

    @contextlib.asynccontextmanager
    async def _between(self, key: str, stage: str) -> AsyncIterator[None]:
        """Wait for a moment between two calls of the slice, and keep it for one: steps of others go on after it."""
        async with self._lane:
            with self._at(key, stage):
                yield

    @contextlib.contextmanager
    def _at(self, key: str, stage: str) -> Iterator[None]:
        self._check_stays()
        work = f"{stage} of {key}"
        self._at_work.append(work)
        self._tell(", ".join(self._at_work))
        try:
            with self._time.taken():
                yield
        finally:
            self._at_work.remove(work)
            self._tell(", ".join(self._at_work) or "idle")

    def _must_go(self, needed_s: float) -> bool:
        """Whether the slice is taken away before that much more work would be done."""
        return self._leave_by is not None and time.monotonic() + needed_s + HAND_OVER_S > self._leave_by

    def _embedding_key(self, prompt: str) -> str:
        host = self._settings.host
        return embedding_key(f"{host.checkpoint} {host.dtype} {host.mesh} {self._settings.slice}", prompt)

    def _span(self, key: str, stage: str, what: What, start_s: float, step: int | None = None) -> Span:
        chips = self._settings.pipeline.chips
        return Span(
            slice=self._name,
            request=key,
            stage=stage,
            what=what,
            start_s=start_s,
            end_s=time.time(),
            step=step,
            pool=self._settings.pool,
            chips="emulated" if chips == "real" and self._slice.emulated else chips,
        )

    def _tell(self, doing: str, progress: Any = None) -> None:
        if self._ended:
            return
        if progress is not None:
            doing = f"{doing} {progress.doing} ({progress.done + 1} of {progress.total})"
        self._doing(doing, self._slice.describe())

    def _doing(self, doing: str, where: str = "") -> None:
        self._board.replica(self._name, self._settings.pool, where, doing)

    def _lost(self, lost: SliceLost) -> StageLost:
        log.error("%s", lost)
        self._end()
        return StageLost(str(lost))

    def _end(self) -> None:
        """End this process, since it leads nothing any more; Serve starts another at once."""
        if not self._ended:
            self._ended = True
            self._board.gone(self._name)
            asyncio.get_running_loop().call_later(LEAVE_S, os._exit, 1)
