"""A replica of a pool: a small CPU actor that leads one slice and takes one request at a time through its stages.

While the slice computes for one request, the next one's inputs are fetched and put on the devices, and the results of
the one before leave. Every method is a stream: spans as they end, then one `Handed` with what it has made. What comes
and goes waits on the request's shelf of the `Exchange`; the streams carry tickets.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve

from actors.board import Board
from actors.embedding_cache import Embedding, EmbeddingCache, embedding_key
from actors.errors import InputLost, RequestFailed, StageLost, StageMoved
from actors.exchange import Shelf, Ticket
from actors.host_values import Plan
from actors.scaling import LOAD
from actors.settings import PoolSettings
from actors.snapshots import Missing, Snapshots
from actors.timeline import Span, What
from cluster.draining import draining_for
from cluster.errors import CallFailed, SliceLost
from cluster.slice_spec import SliceSpec
from cluster.slices import Slice
from wan_tpu.errors import InvalidInput, UnhealthyResult
from wan_tpu.request import GenerationRequest, ResolvedRequest

log = logging.getLogger(__name__)

SHAPES = 64  # that a replica is remembered to hold, for routing
FAILED, REFUSED = "failed: ", "refused: "  # how what a replica does begins when it can't start: again, or never
LEAVE_S = 0.5  # between the loss of a slice and the end of its leader: callers are told first
THREADS = 32  # more than requests can be here: each waits in one, and a health check must not wait for them
HAND_OVER_S = 5.0  # kept free before a drained slice is taken away, to copy a state out and write it


@dataclass(frozen=True)
class Prepared:
    """A request's inputs are on the devices: nobody needs the objects any more.

    seconds  that it took from the object store to the devices; nbytes  of all objects
    """

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Handed:
    """What a stage has made: the ticket of a payload, and when that was ready.

    step  how many denoising steps are done; note  small values, such as warnings
    """

    ticket: Ticket
    ready_s: float
    step: int | None = None
    note: Any = None


Event = Span | Prepared | Handed


class PoolReplica:
    """Leads one slice. Serve restarts it when the slice is lost; its callers go on elsewhere."""

    def __init__(self, settings: PoolSettings) -> None:
        """Take a slice, start its hosts, and let them read the weights of the pool's stages."""
        self._settings = settings
        given = settings.pipeline
        self._name = f"{settings.pool}/{serve.get_replica_context().replica_id.unique_id}"
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="slice")
        self._turn = asyncio.Lock()
        self._snapshots = Snapshots(given.snapshots)
        self._cache = EmbeddingCache.connect(f"{given.name}-embeddings")
        self._board = Board.connect(given.name)
        self._saving: dict[str, asyncio.Task] = {}
        self._visits = itertools.count(1)
        self._ended = False
        self._leave_by: float | None = None  # of time.monotonic(): the slice is being drained, and taken away then
        self._seconds = 0.0  # that a request takes on the slice, the latest counting most
        start = time.time()
        self._doing(f"takes a {settings.slice} and starts its hosts")
        try:
            self._slice = Slice(
                SliceSpec(settings.slice), given.host, settings.host, name=self._name, timeouts=given.timeouts
            )
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
        return await self._side("plan", request)

    async def encode_text(self, key: str, prompt: str, shelf: Shelf) -> AsyncIterator[Event]:
        """Encode a prompt, or find that it has been: one `TextEmbedding`."""
        spans: list[Span] = []

        async def encode() -> tuple[Any, ray.ObjectRef]:
            async with self._busy(key, "encoder"):
                start = time.time()
                warnings, ref = await self._call_payload("encode_text", prompt)
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
            nbytes = await self._side("prepare_encode", held, request)
            yield self._span(key, "encoder", "fetch", start)
            yield Prepared(time.time() - start, nbytes)
            async with self._busy(key, "encoder"):
                start = time.time()
                _, ref = await self._call_payload("encode_image", held)
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
                refs[-1] = await self._run(self._load, kept, snapshot)
            nbytes = await self._side("prepare_denoise", held, plan.without_image, *refs)
            del refs  # or the store would keep them until the last step
            yield self._span(key, stage, "fetch", start)
            yield Prepared(time.time() - start, nbytes)
            done = snapshot or mine[0].start
            async with self._busy(key, stage):
                while done < mine[-1].stop:
                    start = time.time()
                    expert = await self._call("begin", held)
                    while done < expert.stop:
                        fact = await self._call("step", held)
                        done = fact.step
                        span = self._span(key, fact.stage, "compute", start, fact.step)
                        yield span
                        start = time.time()
                        if self._must_go((mine[-1].stop - done) * span.seconds):
                            await self._hand_over(key, held, kept)
                        if done % self._settings.pipeline.snapshot_every == 0 and done < plan.request.steps:
                            self._snapshot(held, kept)
            start = time.time()
            step, ref = await self._side_payload("collect", held)
            if step < plan.request.steps:
                # The next pool starts from this; if that is lost before its first snapshot, nothing is done twice.
                await self._run(self._keep, kept, step, ref)
            yield self._span(key, stage, "fetch", start)
            yield Handed(await shelf.put(ref), time.time(), step)

    async def decode(self, key: str, plan: Plan, state: Ticket, shelf: Shelf) -> AsyncIterator[Event]:
        """Decode final latents: one `EncodedVideo`."""
        await self._hold(plan.shapes["decoder"])
        start = time.time()
        async with self._held(key) as held:
            nbytes = await self._side("prepare_decode", held, plan.without_image, *await shelf.get(state))
            yield self._span(key, "decoder", "fetch", start)
            yield Prepared(time.time() - start, nbytes)
            async with self._busy(key, "decoder"):
                start = time.time()
                _, ref = await self._call_payload("decode", held)
                yield self._span(key, "decoder", "compute", start)
            yield Handed(await shelf.put(ref), time.time())

    async def warm_up(self, request: GenerationRequest) -> dict[str, float]:
        """Compile what a request like this needs; return the seconds by program."""
        plan = await self.plan(request)
        async with self._turn:
            seconds = await self._call("warm_up", request)
        for stage in self._settings.stages:
            if stage in plan.shapes:
                await self._programs(plan.shapes[stage])
        return seconds

    async def held(self) -> list[str]:
        """Return what the hosts of the slice hold: a request's id, and which visit of it."""
        return await self._side("keys")

    # ---- what Serve asks

    @serve.multiplexed(max_num_models_per_replica=SHAPES)
    async def _programs(self, shape: str) -> str:
        """Hold a shape's programs: Serve then prefers this replica for it."""
        return shape

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve how long requests keep the slice, for `actors.scaling`."""
        return {LOAD: self._seconds / self._settings.pipeline.scale_wait_s}

    async def check_health(self) -> None:
        """Leave when the slice is gone, and when it is about to be taken away and nothing runs on it any more."""
        try:
            await self._run(self._slice.check)
        except SliceLost as lost:
            raise self._lost(lost) from None
        left = draining_for(host.node_id for host in self._slice.hosts)
        if left is not None and self._leave_by is None:
            self._leave_by = time.monotonic() + left
            self._tell(f"leaving: its hosts are drained in {left:.0f} s")
            log.warning("%s is being drained, %.0f s left", self._name, left)
        if self._leave_by is not None and not self._turn.locked():
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
            if held in self._saving:
                await asyncio.wait([self._saving.pop(held)])
            with contextlib.suppress(StageLost, RequestFailed):
                await self._side("drop", held)

    @contextlib.asynccontextmanager
    async def _busy(self, key: str, stage: str) -> AsyncIterator[None]:
        """Wait for the slice, and keep it."""
        async with self._turn:
            self._check_stays()
            self._tell(f"{stage} of {key}")
            start = time.monotonic()
            try:
                yield
            finally:
                took = time.monotonic() - start
                self._seconds = took if not self._seconds else 0.8 * self._seconds + 0.2 * took
                self._tell("idle")

    def _must_go(self, needed_s: float) -> bool:
        """Whether the slice is taken away before that much more work would be done."""
        return self._leave_by is not None and time.monotonic() + needed_s + HAND_OVER_S > self._leave_by

    async def _hand_over(self, key: str, held: str, kept: str) -> None:
        step, ref = await self._side_payload("snapshot", held)
        await self._run(self._keep, kept, step, ref)
        raise StageMoved(f"{self._name} is being drained; {key} goes on elsewhere after step {step}")

    def _snapshot(self, held: str, kept: str) -> None:
        """Copy the state out and save it while steps go on; skipped while the one before is still being saved."""
        if held not in self._saving or self._saving[held].done():
            self._saving[held] = asyncio.create_task(self._save(held, kept))

    async def _save(self, held: str, kept: str) -> None:
        try:
            step, ref = await self._side_payload("snapshot", held)
            await self._run(self._keep, kept, step, ref)
        except Exception:  # a snapshot is insurance: the request goes on without
            log.exception("%s: no snapshot of %s", self._name, held)

    def _keep(self, kept: str, step: int, ref: ray.ObjectRef) -> None:
        from actors.payloads import unpack

        self._snapshots.save(kept, step, unpack(ray.get(ref)))  # type: ignore[arg-type]

    def _load(self, kept: str, step: int) -> ray.ObjectRef:
        try:
            return ray.put(self._snapshots.load(kept, step))
        except Missing:
            raise StageLost(f"the snapshot after step {step} of {kept} has been replaced by a newer one") from None
        except InvalidInput as damaged:
            self._snapshots.forget(kept, step)
            raise StageLost(f"a snapshot can't be used and was deleted: {damaged}") from None

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

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._on_slice(self._slice.call, method, *args)

    async def _call_payload(self, method: str, *args: Any) -> Any:
        return await self._on_slice(self._slice.call_payload, method, *args)

    async def _side(self, method: str, *args: Any) -> Any:
        return await self._on_slice(self._slice.side, method, *args)

    async def _side_payload(self, method: str, *args: Any) -> Any:
        return await self._on_slice(self._slice.side_payload, method, *args)

    async def _on_slice(self, run: Callable[..., Any], method: str, *args: Any) -> Any:
        """Run a method on the slice; say of a failure whose it is: the request's, its inputs', or the slice's."""
        try:
            return await self._run(run, method, *args)
        except CallFailed as failed:
            cause = failed.__cause__
            if isinstance(cause, ray.exceptions.RayError):
                raise InputLost(f"{self._name}: {method} lost its input ({type(cause).__name__})") from None
            code = "invalid" if isinstance(cause, InvalidInput) else "error"
            code = "unhealthy" if isinstance(cause, UnhealthyResult) else code
            raise RequestFailed(f"{method}: {cause}", code) from None
        except SliceLost as lost:
            raise self._lost(lost) from None

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

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run in a thread; when cancelled, wait until the thread is done: a step is never left alone."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(function, *args))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
