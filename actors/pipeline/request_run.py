"""One request on its way through the pools: what is lost is done again, from the newest snapshot."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from actors.engine import GeneratedVideo, OnEvent
from actors.errors import InputLost, RequestFailed, StageFailed, StageLost, StageMoved, StageWaited
from actors.observe.logs import log_event
from actors.observe.span import Span
from actors.pipeline.connection import PipelineConnection
from actors.pipeline.losses import losses_explained
from actors.slices.messages import InputsTaken, SliceRequest, StageResult
from actors.slices.payloads import EncodedVideo, unpack
from actors.slices.references import RefHandle, RequestScope
from actors.storage.local import StorageError
from wan_tpu.spec import DECODER, ENCODER, RequestPlan

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0  # before a stage is tried again
OUTAGE_S = 600.0  # A request waits so long for the storage of snapshots: it has one, for all that is known.
ADAPTERS_S = 30.0  # A pool that hasn't looked at a request's adapters by then refuses them when it needs them.
MAX_MOVES = 600  # A request that is sent on so often, and gets nowhere, is given up: each takes a second.


class RequestRun:
    """One request of a driver."""

    def __init__(
        self,
        connection: PipelineConnection,
        key: str,
        plan: RequestPlan,
        on_event: OnEvent,
        priority: int,
        scope: RequestScope,
        snapshots: str,
    ) -> None:
        """scope: where its payloads wait between two stages; snapshots: their name, by `name_of`."""
        self._connection, self._key, self._plan, self._scope = connection, key, plan, scope
        self.snapshots = snapshots
        self._sent = SliceRequest(key, plan.without_image(), scope, self.snapshots, priority, time.time())
        self._on_event = on_event
        self._refused = False
        self._attempts = self._moves = 0  # since something was done that hadn't been done before
        self._done: set[tuple[str, int | None]] = set()
        self._adapters_checked = not plan.request.loras
        self._texts: dict[str, RefHandle] = {}
        self._image: RefHandle | None = None
        self._state: RefHandle | None = None  # between two pools of experts, until the second has it
        self._reached = 0  # how many steps it has done
        self._latents: RefHandle | None = None  # of the last step, until there is a video of them
        self._warnings: set[str] = set()  # Sorted in the end: text and image are encoded at the same time.

    async def run(self) -> GeneratedVideo:
        """Go through all stages; after a loss, go on from the newest snapshot."""
        while True:
            try:
                return GeneratedVideo(await self._go_through(), tuple(sorted(self._warnings)))
            except RequestFailed as failed:
                if not failed.elsewhere or self._refused:
                    raise
                self._refused = True  # by one slice, which may be alone with it
                self._avoid(failed.replica)
                await asyncio.sleep(FIRST_WAIT_S)
            except (StageLost, InputLost) as lost:
                self._avoid(getattr(lost, "replica", None))
                if isinstance(lost, InputLost):  # one of them: all that was handed over is made again
                    self._drop_inputs()
                    self._scope.drop(self._latents, self._state)
                    self._latents = self._state = None
                await self._wait_after(lost)

    def _avoid(self, replica: str | None) -> None:
        if replica is not None:
            self._sent = dataclasses.replace(self._sent, avoid=self._sent.avoid | {replica})

    async def _go_through(self) -> bytes:
        if self._latents is None:
            self._latents = await self._denoised()
        return await self._decode(self._latents)

    async def _denoised(self) -> RefHandle:
        """Run the steps that are left; return the last one's state."""
        plan, steps = self._plan, self._plan.request.steps
        step, snapshot = self._reached, None
        if self._state is None:  # else the stage before has left it, and nothing has had it since
            snapshot = await self._newest_snapshot()
            step = plan.first_step if snapshot is None else snapshot
        while self._state is None or step < steps:  # a snapshot after the last step is collected where that was run
            step = await self._denoise(plan.expert_at(min(step, steps - 1)).stage, snapshot)
            snapshot = None
        return self._state

    async def _newest_snapshot(self) -> int | None:
        until, pause_s = time.monotonic() + OUTAGE_S, FIRST_WAIT_S
        while True:
            try:
                found = await asyncio.to_thread(self._connection.snapshots.newest, self.snapshots)
                break
            except StorageError as error:
                if time.monotonic() > until:
                    raise RequestFailed(f"there is no telling how far it was: {error}", "lost") from None
                log.warning("%s: there is no telling how far it was: %s", self._key, error)
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_WAIT_S, 2 * pause_s)
        if found is not None:
            log_event(log, "goes on", job=self._key, step=found)
        return found

    async def _denoise(self, stage: str, snapshot: int | None) -> int:
        """Run the experts of one pool; return how many steps are done."""
        if not self._adapters_checked:
            await self._check_adapters()
            self._adapters_checked = True
        inputs = await self._inputs()
        state = self._state
        pool_of = self._connection.layout.pool_of
        last = pool_of(stage) == pool_of(self._plan.experts[-1].stage)

        def prepared() -> None:
            self._scope.drop(state)
            self._state = None
            if last:  # encoded again if this fails: less than what holding it all the time would cost the store
                self._drop_inputs()

        self._connection.status.request(self._key, stage, steps=self._plan.request.steps)
        async with self._connection.queue(stage).entered(self._sent.priority, self._sent.came_s):
            pool = self._connection.stream(stage, self._plan.shapes[stage])
            events = pool.denoise.remote(self._sent, inputs, state, snapshot)
            made = await self._follow(stage, events, prepared)
        assert made.step is not None
        self._state, self._reached = made.handle, made.step
        return made.step

    async def _decode(self, latents: RefHandle) -> bytes:
        pool = self._connection.stream(DECODER, self._plan.shapes[DECODER])
        video = await self._follow(DECODER, pool.decode.remote(self._sent, latents))
        try:
            with losses_explained():
                [ref] = await self._scope.get(video.handle)
                assert ref is not None
                content = unpack(await ref)
        except InputLost as lost:  # the video; the latents of it are still there
            raise StageLost(str(lost)) from None
        self._scope.drop(latents)
        assert isinstance(content, EncodedVideo)
        return content.mp4.tobytes()

    async def _check_adapters(self) -> None:
        """Have every pool that will use the request's adapters look at them, which the driver may not see."""
        pools = {self._connection.layout.pool_of(expert.stage).name: expert.stage for expert in self._plan.experts}
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADAPTERS_S), asyncio.TaskGroup() as group:
                    for stage in pools.values():
                        group.create_task(self._check_adapters_at(stage))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _check_adapters_at(self, stage: str) -> None:
        events = self._connection.stream(stage, self._plan.shapes[stage]).check_adapters.remote(self._sent)
        try:
            with losses_explained():
                async for _ in events:
                    pass
        except asyncio.CancelledError:
            events.cancel()
            raise

    async def _inputs(self) -> list[RefHandle | None]:
        """Return prompt, negative prompt and image, None where there is none; encode what isn't there."""
        request = self._plan.request
        try:
            async with asyncio.TaskGroup() as group:  # when one fails, the others are cancelled
                for prompt in dict.fromkeys(self._plan.prompts):
                    if prompt not in self._texts:
                        group.create_task(self._encode_text(prompt))
                if (request.image is not None or request.video is not None) and self._image is None:
                    group.create_task(self._encode_image())
        except ExceptionGroup as several:  # not `except*`: what is raised in one comes out in a group again (3.11.2)
            raise several.exceptions[0] from None
        texts: list[RefHandle | None] = [self._texts[prompt] for prompt in self._plan.prompts]
        return [*[*texts, None][:2], self._image]

    async def _encode_text(self, prompt: str) -> None:
        events = self._connection.stream(ENCODER).encode_text.remote(self._sent, prompt)
        self._texts[prompt] = (await self._follow(ENCODER, events)).handle

    async def _encode_image(self) -> None:
        pool = self._connection.stream(ENCODER, self._plan.shapes[ENCODER])
        events = pool.encode_image.remote(self._sent, self._plan.request)
        self._image = (await self._follow(ENCODER, events)).handle

    def _drop_inputs(self) -> None:
        self._scope.drop(self._image, *self._texts.values())
        self._texts, self._image = {}, None

    async def _follow(
        self, stage: str, events: AsyncIterator[Any], prepared: Callable[[], None] = lambda: None
    ) -> StageResult:
        """Follow a stage to its end; cancelled with this task."""
        status, steps, made = self._connection.status, self._plan.request.steps, None
        status.request(self._key, stage, steps=steps)
        try:
            with losses_explained():
                async for event in events:
                    if isinstance(event, Span):
                        self._tell(event)
                        self._note_progress(event.stage, event.step)
                        if event.step is not None:
                            status.request(self._key, event.stage, event.step, steps, event.seconds)
                    elif isinstance(event, InputsTaken):
                        prepared()
                        status.handoff(stage, event.seconds, event.nbytes)
                    else:
                        made = event
        except asyncio.CancelledError:
            events.cancel()  # type: ignore[attr-defined]
            raise
        if made is None:
            raise StageLost(f"{stage} of {self._key} ended without a result")
        self._warnings.update(made.warnings)
        self._note_progress(f"end of {stage}", made.step)
        return made

    def _tell(self, span: Span) -> None:
        """Tell whoever watches, whose mistakes are no reason to stop."""
        try:
            self._on_event(span)
        except Exception:
            log.exception("%s: what watches it has failed", self._key)

    def _note_progress(self, what: str, step: int | None) -> None:
        if (what, step) not in self._done:
            self._done.add((what, step))
            self._attempts = self._moves = 0

    async def _wait_after(self, lost: Exception) -> None:
        """Wait before the next attempt; raises `RequestFailed` when there were enough that came to nothing."""
        if isinstance(lost, StageWaited):
            return
        if isinstance(lost, StageMoved) and self._moves < MAX_MOVES:
            self._moves += 1
            log.info("%s: %s", self._key, lost)
            await asyncio.sleep(2 * FIRST_WAIT_S)
            return
        self._attempts += 1
        reason = str(lost).splitlines()[0] if str(lost) else type(lost).__name__
        if self._attempts >= self._connection.settings.attempts:
            if isinstance(lost, StageFailed):  # everywhere: it is the request
                raise RequestFailed(f"failed {self._attempts} times; the last: {reason}", "error")
            raise RequestFailed(f"given up after {self._attempts} attempts at one stage; the last: {reason}", "lost")
        log.warning("%s: %s; attempt %d", self._key, reason, self._attempts + 1)
        await asyncio.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**self._attempts))
