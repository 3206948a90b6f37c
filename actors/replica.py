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
from actors.errors import InputLost, RequestFailed, StageLost
from actors.events import Event, Handed, Prepared
from actors.exchange import Shelf, Ticket
from actors.host_values import Plan
from actors.keeping import Keeping
from actors.leaving import Leaving
from actors.scaling import LOAD, SliceTime
from actors.settings import PoolSettings
from actors.snapshots import Snapshots
from actors.stepping import Stepping, Visit
from actors.timeline import Span, What
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


class PoolReplica:
    """Leads one slice. Serve restarts it when the slice is lost; its callers go on elsewhere."""

    def __init__(self, settings: PoolSettings) -> None:
        """Take a slice, start its hosts, and let them read the weights of the pool's stages."""
        self._settings = settings
        given = settings.pipeline
        self._name = f"{settings.pool}/{serve.get_replica_context().replica_id.unique_id}"
        self._lane = asyncio.Lock()  # calls of the slice, in the order in which they come
        self._cache = EmbeddingCache.connect(f"{given.name}-embeddings")
        self._board = Board.connect(given.name)
        self._at_work: list[str] = []  # stages of requests
        self._visits = itertools.count(1)
        self._ended = False
        self._leaving = Leaving(self._name)
        self._time = SliceTime()
        start = time.time()
        self._doing(f"takes a {settings.slice} and starts its hosts")
        try:
            snapshots = Snapshots(given.snapshots)
            self._slice = Slice(
                SliceSpec(settings.slice), given.host, settings.host, name=self._name, timeouts=given.timeouts
            )
            self._calls = Calls(self._slice, settings.batch, self._lost)
            self._keeping = Keeping(self._calls, snapshots)
            self._stepping = Stepping(
                self._calls,
                self._keeping,
                self._leaving,
                self._lane,
                batch=settings.batch,
                snapshot_every=given.snapshot_every,
                at=self._at,
                span=lambda key, stage, start, step: self._span(key, stage, "compute", start, step),
            )
            self._tell("reads weights")
            self._slice.call("load", on_progress=lambda told: self._tell("reads", told))
            for request in given.warm_up:
                self._tell("compiles")
                self._slice.call("warm_up", request, on_progress=lambda told: self._tell("compiles", told))
            self._board.compiled(settings.pool, self._slice.side("compiled"))
        except Exception as error:
            cause = error.__cause__ if isinstance(error, CallFailed) else error
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
        priority: int,
        shelf: Shelf,
    ) -> AsyncIterator[Event]:
        """Run all steps of this pool's experts: one `DenoiseState`.

        inputs    tickets of prompt, negative prompt or None, image or None
        state     where the pool before has left off
        kept      the name of the request's snapshots; snapshot  the step of the one to go on from
        priority  a request of a higher one takes the slice between two steps of this one

        Raises `StageMoved` when the slice is taken away before the last step could be done, a snapshot taken.
        """
        mine = tuple(expert for expert in plan.experts if expert.stage in self._settings.stages)
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
            visit = Visit(key, held, kept, plan, mine, priority, shelf)
            async with contextlib.aclosing(self._stepping.run(visit, snapshot or mine[0].start)) as spans:
                told = False
                async for span in spans:
                    yield span
                    if not told:  # the first step is the one that compiles
                        await self._tell_compiled()
                    told = True
            start = time.time()
            step, ref = await self._calls.side_payload("collect", held)
            if step < plan.request.steps:
                # The next pool starts from this; if that is lost before its first snapshot, nothing is done twice.
                await self._keeping.keep(kept, step, ref)
            yield self._span(key, stage, "fetch", start)
            yield Handed(await shelf.put(ref), time.time(), step)

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
        async with self._stepping.turn.held():
            seconds = await self._calls.call("warm_up", request)
        await self._tell_compiled()
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
        """Hold a shape's programs: Serve tells it to `actors.routing`."""
        return shape

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve how long requests keep the slice, for `actors.scaling`."""
        return {LOAD: self._time.seconds / self._settings.pipeline.scale_wait_s}

    async def check_health(self) -> None:
        """Leave when the slice is gone, and when it is about to be taken away and nothing runs on it any more."""
        await self._calls.check()
        left = draining_for(host.node_id for host in self._slice.hosts)
        if left is not None and not self._leaving.known:
            self._leaving.begin(left)
            self._stepping.turn.send_away(self._leaving.moved)
            self._tell(f"leaving: its hosts are drained in {left:.0f} s")
            log.warning("%s is being drained, %.0f s left", self._name, left)
        if self._leaving.known and not self._stepping.turn.taken() and not self._lane.locked():
            self._slice.close()
            self._end()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._slice.close()
            self._board.gone(self._name)

    # ----

    async def _hold(self, shape: str) -> None:
        self._leaving.check()
        await self._programs(shape)

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
    async def _between(self, key: str, stage: str) -> AsyncIterator[None]:
        """Wait for a moment between two calls of the slice, and keep it for one: steps of others go on after it."""
        async with self._lane:
            with self._at(key, stage):
                yield
        await self._tell_compiled()

    async def _tell_compiled(self) -> None:
        if seconds := await self._calls.side("compiled"):
            self._board.compiled(self._settings.pool, seconds)

    @contextlib.contextmanager
    def _at(self, key: str, stage: str) -> Iterator[None]:
        self._leaving.check()
        work = f"{stage} of {key}"
        self._at_work.append(work)
        self._tell(", ".join(self._at_work))
        try:
            with self._time.taken():
                yield
        finally:
            self._at_work.remove(work)
            self._tell(", ".join(self._at_work) or "idle")

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
            self._leaving.begin(0.0)  # who comes before the end is sent on: the loss has cost its attempt already
            self._board.gone(self._name)
            asyncio.get_running_loop().call_later(LEAVE_S, os._exit, 1)
