"""One request on its way through the pools; after a loss, it continues from its newest snapshot."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from actors.engine import Fragment, GeneratedVideo, OnEvent, OnFragment, OnPreview, PreviewPicture, call_back
from actors.errors import InputLost, RequestFailed, StageInterrupted, StageMoved
from actors.observe.logs import log_event
from actors.observe.span import Span
from actors.pipeline.connection import PipelineConnection
from actors.pipeline.losses import explain_losses
from actors.pipeline.retry_budget import LONGEST_WAIT_S, RetryBudget
from actors.retrying import FIRST_PAUSE_S, back_off, retry
from actors.slices.messages import (
    ChunkDenoised,
    EncodedFragment,
    InputsTaken,
    PreviewPainted,
    SliceRequest,
    StageResult,
)
from actors.slices.payloads import EncodedVideo, unpack
from actors.slices.references import RefHandle, RequestScope
from wan_tpu.plan import DECODER, ENCODER, RequestPlan
from wan_tpu.stage_machine import (
    Decode,
    Encode,
    EncodeImage,
    EncodeText,
    Finish,
    Operation,
    StageMachine,
    Step,
)
from wan_tpu.storage.base import StorageError

log = logging.getLogger(__name__)


class RequestRun:
    def __init__(
        self,
        connection: PipelineConnection,
        key: str,
        plan: RequestPlan,
        on_event: OnEvent,
        priority: int,
        scope: RequestScope,
        snapshots: str,
        on_fragment: OnFragment | None = None,
        on_preview: OnPreview | None = None,
    ) -> None:
        """Take a request through a pipeline.

        Args:
            scope: Where the request's payloads wait between two stages.
            snapshots: The name of its snapshots, from `name_of`.
            on_fragment: Called with fragments of the video; None to have none made.
            on_preview: Called with pictures of the unfinished video; None to have none made.
        """
        self._connection, self._key, self._plan, self._scope = connection, key, plan, scope
        self.snapshots = snapshots
        self._sent = SliceRequest(
            key,
            plan.without_image(),
            scope,
            snapshots,
            priority,
            time.time(),
            fragments=on_fragment is not None,
            previews=on_preview is not None,
        )
        self._on_preview = on_preview
        self._on_fragment, self._run = on_fragment, -1  # The run that the latest fragment belongs to.
        self._on_event, self._limits = on_event, connection.settings.reliability
        self._refused = False
        self._retries = RetryBudget(key, self._limits)
        self._adapters_checked = not plan.request.loras
        self._machine = StageMachine(plan)
        self._encoded: dict[Encode, RefHandle] = {}  # Payloads of the inputs that the machine counts as encoded.
        self._state: RefHandle | None = None  # Held from one pool's result until the next pool has it on its devices.
        # Decodes chunks while later ones are denoised, or draws the decoder's noise meanwhile. If it fails, the next
        # chunk or step starts it again.
        self._decoding: asyncio.Task[StageResult] | None = None
        self._decodings = 0
        self._draws_noise = connection.model.begins_decoder_with_noise and len(plan.chunk_stops) == 1
        self._warnings = set(plan.warnings)  # Sorted at the end, because text and image are encoded at the same time.

    async def run(self) -> GeneratedVideo:
        """Go through all stages, and after a loss continue from the newest snapshot."""
        try:
            return await self._resume_until_done()
        finally:
            if self._decoding is not None:
                self._decoding.cancel()
                await asyncio.wait([self._decoding])
                if not self._decoding.cancelled():
                    self._decoding.exception()  # Marks it as retrieved, since another error ends the request.

    async def _resume_until_done(self) -> GeneratedVideo:
        while True:
            try:
                video = await self._go_through()
                last_frame = None if video.last_frame is None else video.last_frame.copy()  # Outlives the object store.
                tail = None if video.tail is None else video.tail.tobytes()
                warnings, frames = tuple(sorted(self._warnings)), self._plan.request.frames
                return GeneratedVideo(video.mp4.tobytes(), warnings, last_frame, frames, tail)
            except RequestFailed as failed:
                if not failed.elsewhere or self._refused:
                    raise
                self._refused = True  # Another slice may accept it; a second refusal is final.
                self._avoid(failed.replica)
                await asyncio.sleep(FIRST_PAUSE_S)
            except (StageInterrupted, InputLost) as lost:
                self._avoid(getattr(lost, "replica", None))
                if isinstance(lost, InputLost):  # It isn't known which payload was lost, so all are computed again.
                    self._drop_inputs()
                    self._scope.drop(self._state)
                    self._state = None
                await self._retries.wait_after(lost)

    def _avoid(self, replica: str | None) -> None:
        if replica is not None:
            self._sent = dataclasses.replace(self._sent, avoid=self._sent.avoid | {replica})

    async def _go_through(self) -> EncodedVideo:
        """Run the operations of the stage machine until there is a video."""
        if self._state is None:  # Otherwise the previous pool has handed over a state that is still waiting.
            self._machine = self._machine.at_step(await self._find_newest_snapshot())
        while not self._machine.is_finished:
            # Decoding is left out: `_decode_ahead` starts it in parallel.
            match [operation for operation in self._machine.next if not isinstance(operation, Decode)]:
                case [Step() | Finish() as operation]:
                    await self._denoise(operation.stage)
                case encodings:
                    await self._encode(encodings)
        return await self._decode()

    async def _find_newest_snapshot(self) -> int | None:
        until = time.monotonic() + self._limits.snapshots_s

        async def note(error: Exception, _pause_s: float) -> None:
            if time.monotonic() > until:
                raise RequestFailed(f"there is no telling how far it was: {error}", "lost") from None
            log.warning("%s: there is no telling how far it was: %s", self._key, error)

        find = functools.partial(asyncio.to_thread, self._connection.snapshots.find_newest, self.snapshots)
        step = await retry(find, (StorageError,), back_off(LONGEST_WAIT_S), note)
        if step is not None:
            log_event(log, "goes on", job=self._key, step=step)
        return step

    async def _denoise(self, stage: str) -> None:
        """Have one pool run all steps that it can, from the state handed over or otherwise from the snapshot."""
        state, steps = self._state, self._plan.steps
        pool = self._connection.layout.find_pool(stage)
        texts: list[RefHandle | None] = [self._encoded[EncodeText(prompt)] for prompt in self._plan.prompts]
        inputs = [*[*texts, None, None][:2], self._encoded.get(EncodeImage())]

        def drop_payloads() -> None:
            self._scope.drop(state)
            self._state = None
            # After a loss the inputs are encoded again, which costs less than holding them in the store all the time.
            if not self._machine.needs_inputs_beyond(pool.stages):
                self._drop_inputs()

        slices = self._connection.open_stream(stage, self._plan.shapes[stage])
        events = slices.denoise.remote(self._sent, inputs, state, self._machine.step)
        result = await self._follow(stage, events, drop_payloads)
        assert result.step is not None
        self._state = result.handle
        self._machine = self._machine.at_step(result.step, is_finished=result.step == steps)

    def _decode_ahead(self, denoising: Any) -> None:
        """Start decoding unless that is under way. If it has failed for good, end denoising and raise `RequestFailed`.

        The decoder takes chunks as they are denoised. Of a video without chunks, it draws its noise meanwhile.
        """
        if (before := self._decoding) is not None:
            if not before.done() or (error := before.exception()) is None:
                return
            if isinstance(error, RequestFailed):
                denoising.cancel()
                raise error
            self._decodings -= isinstance(error, StageMoved)  # A move is no failure, so it doesn't count.
            self._avoid(getattr(error, "replica", None))
            log.warning("%s: %s; its decoder begins again", self._key, error)
        if self._decodings < self._limits.stage_attempts:  # Otherwise everything is decoded together at the end.
            self._decodings += 1
            self._decoding = asyncio.create_task(self._follow_ahead())

    async def _follow_ahead(self) -> StageResult:
        if self._draws_noise:
            await self._scope.expect_latents()
        pool = self._connection.open_stream(DECODER, self._plan.shapes[DECODER])
        try:
            return await self._follow(DECODER, pool.decode.remote(self._sent, None), is_concurrent=True)
        except InputLost as lost:  # Nothing is encoded again, since `_decode` can give the final state.
            raise StageInterrupted(str(lost)) from None

    async def _decode(self) -> EncodedVideo:
        latents = self._state
        assert latents is not None
        if self._draws_noise and self._decoding is not None and self._decoding.done():
            if (error := self._decoding.exception()) is not None:  # The noise is lost, and nothing else.
                self._avoid(getattr(error, "replica", None))
                log.warning("%s: %s; its decoder begins again", self._key, error)
            self._decoding = None
        if self._decoding is not None:
            self._connection.status.report_request(self._key, DECODER, steps=self._plan.steps)
            if self._draws_noise:
                self._scope.offer_latents(latents)
            decoding, self._decoding = self._decoding, None  # If this fails, everything is decoded together.
            video = await decoding
        else:
            pool = self._connection.open_stream(DECODER, self._plan.shapes[DECODER])
            video = await self._follow(DECODER, pool.decode.remote(self._sent, latents))
        try:
            with explain_losses():
                [ref] = await self._scope.get(video.handle)
                assert ref is not None
                content = unpack(await ref)
        except InputLost as lost:  # The video is lost, but its latents still exist.
            raise StageInterrupted(str(lost)) from None
        self._scope.drop(latents)
        assert isinstance(content, EncodedVideo)
        return content

    async def _check_adapters(self) -> None:
        """Have every pool that will use the adapters check them, because the driver itself may not reach the files."""
        pools = {self._connection.layout.find_pool(expert.stage).name: expert.stage for expert in self._plan.experts}
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.adapters_s), asyncio.TaskGroup() as group:
                    for stage in pools.values():
                        group.create_task(self._check_adapters_at(stage))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _check_adapters_at(self, stage: str) -> None:
        events = self._connection.open_stream(stage, self._plan.shapes[stage]).check_adapters.remote(self._sent)
        try:
            with explain_losses():
                async for _ in events:
                    pass
        except asyncio.CancelledError:
            events.cancel()
            raise

    async def _encode(self, encodings: Sequence[Operation]) -> None:
        """Encode all missing inputs at the same time, once the pools have checked the request's adapters."""
        if not self._adapters_checked:
            await self._check_adapters()
            self._adapters_checked = True
        try:
            async with asyncio.TaskGroup() as group:  # When one task fails, the others are cancelled.
                for encoding in encodings:
                    assert isinstance(encoding, Encode)
                    group.create_task(self._encode_one(encoding))
        except ExceptionGroup as several:  # Not `except*`, which wraps errors in a group again (Python 3.11.2).
            raise several.exceptions[0] from None

    async def _encode_one(self, encoding: Encode) -> None:
        if isinstance(encoding, EncodeText):
            events = self._connection.open_stream(ENCODER).encode_text.remote(self._sent, encoding.prompt)
        else:
            pool = self._connection.open_stream(ENCODER, self._plan.shapes[ENCODER])
            events = pool.encode_image.remote(self._sent, self._plan.request)
        result = await self._follow(ENCODER, events)
        self._encoded[encoding] = result.handle
        self._machine = self._machine.after(encoding)
        if result.seconds is not None and encoding == EncodeText(self._plan.request.prompt):
            self._set_length(result.seconds)

    def _set_length(self, seconds: float) -> None:
        """Set the video's length, if it is still open."""
        if self._plan.has_open_length:
            self._plan = self._connection.model.set_length(self._plan, seconds)
            self._sent = dataclasses.replace(self._sent, plan=self._plan.without_image())
            self._machine = self._machine.with_plan(self._plan)

    def _drop_inputs(self) -> None:
        self._scope.drop(*self._encoded.values())
        self._encoded.clear()
        self._machine = self._machine.without_inputs()

    async def _follow(
        self,
        stage: str,
        events: AsyncIterator[Any],
        on_inputs: Callable[[], None] = lambda: None,
        *,
        is_concurrent: bool = False,
    ) -> StageResult:
        """Follow a stage to its end, or cancel it with this task.

        Args:
            is_concurrent: Whether the request is also at another stage, which is the one that the status shows.
        """
        status, steps, result = self._connection.status, self._plan.steps, None
        if not is_concurrent:
            status.report_request(self._key, stage, steps=steps)
        try:
            with explain_losses():
                async for event in events:
                    if isinstance(event, Span):
                        call_back(self._on_event, event, self._key)
                        self._retries.note_progress(event.stage, event.step)
                        if (event.step is not None or event.chosen) and not is_concurrent:
                            step_s = None if event.step is None else event.seconds
                            where = self._key, event.stage, event.step or 0, steps
                            status.report_request(*where, step_s, event.slice, event.chosen)
                        # The router counts a decoder that draws noise as busy, so it begins in the last quarter.
                        if self._draws_noise and event.step is not None and 0.75 * (steps - 1) <= event.step < steps:
                            self._decode_ahead(events)
                    elif isinstance(event, InputsTaken):
                        on_inputs()
                        status.report_handoff(stage, event.seconds, event.nbytes)
                    elif isinstance(event, ChunkDenoised):
                        self._decode_ahead(events)
                    elif isinstance(event, EncodedFragment):
                        self._run += event.index == 0  # A decoder that fails before its first fragment begins no run.
                        call_back(self._on_fragment, Fragment(self._run, event.index, event.content), self._key)
                    elif isinstance(event, PreviewPainted):
                        call_back(self._on_preview, PreviewPicture(event.step, event.picture), self._key)
                    else:
                        result = event
        except asyncio.CancelledError:
            events.cancel()  # type: ignore[attr-defined]
            raise
        if result is None:
            raise StageInterrupted(f"{stage} of {self._key} ended without a result")
        self._warnings.update(result.warnings)
        self._retries.note_progress(f"end of {stage}", result.step)
        return result
