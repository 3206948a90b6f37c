"""The pipeline across slices: chains the pools, passes references on, and does again what was lost.

The process that runs this never holds a latent: what it gets of a stage are tickets of the `Exchange` and small facts.
In the end it gets the bytes of an mp4.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from actors.board import Board
from actors.errors import InputLost, PipelineError, PipelineFull, RequestFailed, StageLost, StageMoved
from actors.events import Handed, Prepared
from actors.exchange import Exchange, Shelf, Ticket
from actors.host_values import Plan
from actors.line import Line
from actors.payloads import EncodedVideo, unpack
from actors.pools import handle, line
from actors.settings import PipelineSettings
from actors.snapshots import Snapshots, name_of
from actors.storage import StorageError
from actors.timeline import Span
from cluster.layout import Layout
from wan_tpu.expert import TOGETHER
from wan_tpu.request import GenerationRequest

log = logging.getLogger(__name__)

OnEvent = Callable[[Span], object]
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0  # before a stage is tried again
LOST = (StageLost, InputLost)


class Pipeline:
    """A running layout, ready to make videos: the engine of batches and of the online service."""

    def __init__(self, layout: Layout, settings: PipelineSettings) -> None:
        """The pools must run (`pools.deploy`)."""
        self.settings = settings
        self._pools = {stage: pool.name for pool in layout.pools for stage in pool.stages}
        self._handles = {pool.name: handle(settings.name, pool.name) for pool in layout.pools}
        self._board = Board.connect(settings.name)
        self._exchange = Exchange()
        self._snapshots = Snapshots(settings.snapshots)
        self._places = Line(settings.in_flight, settings.urgent)
        self._lines = {pool.name: line(pool) for pool in layout.pools if set(pool.stages) & set(TOGETHER)}
        self._inside: set[str] = set()

    async def generate(
        self,
        request: GenerationRequest,
        *,
        id: str,  # noqa: A002
        on_event: OnEvent = lambda span: None,
        priority: int = 0,
    ) -> bytes:
        """Make one video and return its mp4.

        id        names the request in spans, logs and snapshots; one that was left unfinished goes on where it was
        on_event  told a `Span` whenever a slice has done something for it
        priority  the higher goes first; at the experts' slices it takes the place of a lower one between two steps

        Raises `RequestFailed` when it can't be made, `PipelineFull` when too many wait.
        """
        if id in self._inside:
            raise RequestFailed(
                f"a request {id} is under way already; wait for it, or give this one another id", "invalid"
            )
        if len(self._inside) >= self.settings.in_flight + self.settings.waiting:
            raise PipelineFull(
                f"{len(self._inside)} requests are in the pipeline and before it, all it takes; try again later"
            )
        self._inside.add(id)
        how, kept = "cancelled", False
        try:
            self._board.request(id, "waiting")
            async with self._places.place(priority):
                shelf = self._exchange.shelf()
                try:
                    video = await _Making(self, id, request, on_event, priority, shelf).run()
                finally:
                    shelf.end()
            how = "done"
            return video
        except RequestFailed as failed:
            how = "failed"
            kept = failed.code == "lost"  # whoever tries again goes on from there
            raise
        finally:
            self._inside.remove(id)
            self._board.ended(id, how)
            if how != "cancelled" and not kept:
                await asyncio.to_thread(self._clean_up, id)

    def _clean_up(self, id: str) -> None:  # noqa: A002
        try:
            self._snapshots.delete(id)
        except StorageError as error:  # the video is made
            log.warning("%s: its snapshots stay: %s", id, error)

    async def plan(self, request: GenerationRequest) -> Plan:
        """Return what a request takes; raises `RequestFailed` when the model can't make it, `StageLost`."""
        with _losses():
            return await self.call("encoder", stream=False).plan.remote(request)

    def close(self) -> None:
        """Let go of the pools; before `ray.shutdown`, which the handles' threads don't notice."""
        for pool in self._handles.values():
            pool.shutdown()

    def pool_of(self, stage: str) -> str:
        """Return the pool that hosts a stage."""
        return self._pools[stage]

    def line(self, stage: str) -> Line:
        """Return the line before an expert stage's pool."""
        return self._lines[self._pools[stage]]

    def call(self, stage: str, shape: str | None = None, *, stream: bool = True) -> Any:
        """Return the handle to a stage's pool; of equally busy replicas, one that holds the shape is taken."""
        options: dict[str, Any] = {"stream": True} if stream else {}
        if shape is not None:
            options["multiplexed_model_id"] = shape
        return self._handles[self._pools[stage]].options(**options)


class _Making:
    """One request on its way."""

    def __init__(
        self,
        pipeline: Pipeline,
        key: str,
        request: GenerationRequest,
        on_event: OnEvent,
        priority: int,
        shelf: Shelf,
    ) -> None:
        self._pipeline = pipeline
        self._key = key
        self._request = request
        self._on_event = on_event
        self._priority = priority
        self._shelf = shelf
        self._attempts = 0  # since something was done that hadn't been done before
        self._done: set[tuple[str, int | None]] = set()
        self._lost_input = False
        self._texts: dict[str, Ticket] = {}
        self._image: Ticket | None = None
        self._state: Ticket | None = None
        self._steps = 0

    async def run(self) -> bytes:
        """Go through all stages; after a loss, go on from the newest snapshot."""
        plan = None
        while True:
            try:
                if self._lost_input and plan is not None:
                    await self._forget(plan)
                plan = plan or await self._plan()
                return await self._go_on(plan)
            except LOST as lost:
                self._lost_input |= isinstance(lost, InputLost)
                await self._again(lost)

    async def _plan(self) -> Plan:
        found = await self._pipeline.plan(self._request)
        self._steps = found.request.steps
        return found

    async def _go_on(self, plan: Plan) -> bytes:
        self._state = None
        settings = self._pipeline.settings
        kept = name_of(self._key, plan.request, f"{settings.checkpoint} {settings.dtype}")
        try:
            snapshot = await asyncio.to_thread(self._pipeline._snapshots.newest, kept)
        except StorageError as error:
            raise RequestFailed(f"there is no telling how far it was: {error}", "error") from None
        step = snapshot or 0
        while step < plan.request.steps:
            expert = next(expert for expert in plan.experts if step < expert.stop)
            step = await self._denoise(plan, expert.stage, kept, snapshot)
            snapshot = None
        state, self._state = self._state, None
        assert state is not None
        video = await self._stage(
            "decoder",
            self._pipeline.call("decoder", plan.shapes["decoder"]).decode.remote(
                self._key, plan.light(), state, self._shelf
            ),
            lambda: self._shelf.drop(state),
        )
        with _losses():
            [ref] = await self._shelf.get(video.ticket)
            assert ref is not None
            payload = await ref
        content = unpack(payload)
        assert isinstance(content, EncodedVideo)
        return content.mp4.tobytes()

    async def _denoise(self, plan: Plan, stage: str, kept: str, snapshot: int | None) -> int:
        """Run the experts of one pool; return how many steps are done."""
        texts, image = await self._inputs(plan)
        state, self._state = self._state, None
        call = self._pipeline.call(stage, plan.shapes[stage])
        last = self._pipeline.pool_of(stage) == self._pipeline.pool_of(plan.experts[-1].stage)

        def prepared() -> None:
            self._shelf.drop(state)
            if last:  # encoded again if this fails: less than what holding it all the time would cost the store
                self._shelf.drop(image, *self._texts.values())
                self._texts, self._image = {}, None

        self._pipeline._board.request(self._key, stage, steps=self._steps)
        async with self._pipeline.line(stage).place(self._priority):
            events = call.denoise.remote(
                self._key,
                plan.light(),
                [*texts, image],
                state=state,
                kept=kept,
                snapshot=snapshot,
                priority=self._priority,
                shelf=self._shelf,
            )
            made = await self._stage(stage, events, prepared)
        assert made.step is not None
        self._state = made.ticket
        return made.step

    async def _inputs(self, plan: Plan) -> tuple[list[Ticket | None], Ticket | None]:
        """Return text embeddings (the second None without guidance) and image condition; encode what isn't there."""
        wanted: list[Any] = [self._text(prompt) for prompt in set(plan.prompts) - set(self._texts)]
        if plan.request.image is not None and self._image is None:
            wanted.append(self._encode_image(plan))
        await _all(wanted)
        texts: list[Ticket | None] = [self._texts[prompt] for prompt in plan.prompts]
        return [*texts, None][:2], self._image

    async def _text(self, prompt: str) -> None:
        call = self._pipeline.call("encoder")
        made = await self._stage("encoder", call.encode_text.remote(self._key, prompt, self._shelf))
        self._texts[prompt] = made.ticket

    async def _encode_image(self, plan: Plan) -> None:
        shape = plan.shapes["encoder"]
        call = self._pipeline.call("encoder", shape)
        made = await self._stage("encoder", call.encode_image.remote(self._key, plan.request, shape, self._shelf))
        self._image = made.ticket

    async def _forget(self, plan: Plan) -> None:
        """Have everything that was handed over made again: one of them is lost."""
        self._shelf.drop(self._image)
        self._image = None
        while self._texts:
            prompt, ticket = next(iter(self._texts.items()))
            with _losses():
                call = self._pipeline.call("encoder", stream=False)
                await call.forget_text.remote(prompt, ticket, self._shelf)
            self._shelf.drop(ticket)
            del self._texts[prompt]
        self._lost_input = False

    async def _stage(
        self, stage: str, events: AsyncIterator[Any], prepared: Callable[[], None] = lambda: None
    ) -> Handed:
        """Follow a stage to its end; cancelled with this task."""
        board, made = self._pipeline._board, None
        board.request(self._key, stage, steps=self._steps)
        try:
            with _losses():
                async for event in events:
                    if isinstance(event, Span):
                        self._on_event(event)
                        self._progress(event.stage, event.step)
                        if event.step is not None:
                            board.request(self._key, event.stage, event.step, self._steps, event.seconds)
                    elif isinstance(event, Prepared):
                        prepared()
                        board.handoff(stage, event.seconds, event.nbytes)
                    else:
                        made = event
        except asyncio.CancelledError:
            events.cancel()  # type: ignore[attr-defined]
            raise
        if made is None:
            raise StageLost(f"{stage} of {self._key} ended without a result")
        self._progress(f"end of {stage}", made.step)
        return made

    def _progress(self, what: str, step: int | None) -> None:
        if (what, step) not in self._done:
            self._done.add((what, step))
            self._attempts = 0

    async def _again(self, lost: Exception) -> None:
        """Wait before the next attempt; raises `RequestFailed` when there were enough that came to nothing."""
        if isinstance(lost, StageMoved):
            log.info("%s: %s", self._key, lost)
            await asyncio.sleep(2 * FIRST_WAIT_S)
            return
        self._attempts += 1
        reason = str(lost).splitlines()[0] if str(lost) else type(lost).__name__
        if self._attempts >= self._pipeline.settings.attempts:
            raise RequestFailed(f"given up after {self._attempts} attempts at one place; the last: {reason}", "lost")
        log.warning("%s: %s; attempt %d", self._key, reason, self._attempts + 1)
        await asyncio.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**self._attempts))


async def _all(work: list[Any]) -> None:
    """Do all at once; when one fails the others are cancelled before this raises."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as several:  # not `except*`: what is raised in one comes out in a group again (3.11.2)
        raise several.exceptions[0] from None


@contextlib.contextmanager
def _losses() -> Any:
    """Raise what a stage raised without Ray's wrapping, and what Ray says of losses in this room's words."""
    try:
        yield
    except (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError, TaskCancelledError) as error:
        raise StageLost(_telling(error)) from None
    except BackPressureError as error:  # other drivers use the same pools
        raise StageMoved(_telling(error)) from None
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, PipelineError):
            raise cause from None
        if isinstance(error, ray.exceptions.ObjectLostError) or isinstance(cause, RayError):
            raise InputLost(_telling(cause or error)) from None
        raise RequestFailed(f"{type(cause or error).__name__}: {_telling(cause or error)}", "error") from error


def _telling(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "died" in line or "dead" in line), lines[0] if lines else type(error).__name__
    )
