"""The pipeline as the service uses it: it may be gone, and come back, while jobs wait."""

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncIterator

from PIL import Image
from ray.exceptions import RayError

from actors.api.admission import KNOWN, FixedPlanner, NotReady
from actors.api.logs import told
from actors.batch import OnEvent
from actors.board import Board, Compiled
from actors.errors import PipelineError, RequestFailed
from actors.jobs.notices import Notices
from actors.pipeline import Pipeline
from actors.settings import About
from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.request import Defaults, GenerationRequest, ResolvedRequest

log = logging.getLogger(__name__)

_PLAN_S = 10.0  # for an answer that takes milliseconds
_LEARN_S = 5.0
_REMIND_S = 3600.0


class LastingPipeline:
    """The engine of workers: a `Pipeline` that is made when it is first needed, and anew when it was lost."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._lock = asyncio.Lock()
        self._held: _Held | None = None
        self._compiled_s = 0.0  # when what was last told of compilations was

    async def generate(self, request: GenerationRequest, *, id: str, on_event: OnEvent, priority: int) -> bytes:  # noqa: A002
        """Make one video, as `Pipeline.generate` does; raises `PipelineError` also where there is no pipeline."""
        async with self._used() as pipeline:
            return await pipeline.generate(request, id=id, on_event=on_event, priority=priority)

    async def compiled(self) -> list[Compiled]:
        """Return what replicas have compiled since this was last asked; nothing where there is no pipeline."""
        try:
            board = await asyncio.to_thread(Board.find, self._about.settings.name)
            known = [] if board is None else (await asyncio.to_thread(board.seen)).compiled
        except RayError as error:
            told(log, "compilations unknown", reason=str(error).split("\n")[0])
            return []
        found = [one for one in known if one.told_s > self._compiled_s]
        self._compiled_s = max((one.told_s for one in found), default=self._compiled_s)
        return found

    async def plan(self, request: GenerationRequest) -> ResolvedRequest:
        """Return a request with nothing left open; raises `InvalidRequest`, `NotReady`."""
        try:
            async with asyncio.timeout(2 * _PLAN_S), self._used() as pipeline, asyncio.timeout(_PLAN_S):
                return (await pipeline.plan(request)).request
        except RequestFailed as failed:
            if failed.code == "invalid":
                raise InvalidRequest(str(failed).removeprefix("plan: ")) from None
            raise NotReady(f"the pipeline can't say what it makes: {failed}; try again") from None
        except (PipelineError, TimeoutError) as error:
            raise NotReady(f"the pipeline doesn't answer ({error or 'in time'}); try again") from None

    async def ready(self) -> None:
        """Raise `NotReady` when there is no pipeline that answers."""
        with contextlib.suppress(InvalidRequest):  # an answer as good as any
            await self.plan(GenerationRequest())

    def close(self) -> None:
        """Let go of it."""
        if self._held is not None:
            self._held.pipeline.close()

    @contextlib.asynccontextmanager
    async def _used(self) -> AsyncIterator[Pipeline]:
        """Give the pipeline; it is made anew for the next user when this one finds that it can't be used."""
        async with self._lock:
            if self._held is None:
                self._held = _Held(await asyncio.to_thread(_made, self._about))
            held = self._held
        held.users += 1
        try:
            yield held.pipeline
        except (RequestFailed, InvalidRequest) as failed:
            if getattr(failed, "code", None) == "lost":
                self._drop(held)
            raise
        except Exception:
            self._drop(held)
            raise
        finally:
            held.users -= 1
            if held is not self._held and not held.users:
                await asyncio.to_thread(held.pipeline.close)

    def _drop(self, held: "_Held") -> None:
        if self._held is held:  # what others still do with it goes on
            self._held = None


@dataclasses.dataclass(eq=False)
class _Held:
    """A pipeline, and how many use it at the moment."""

    pipeline: Pipeline
    users: int = 0


def _made(about: About) -> Pipeline:
    try:
        return Pipeline(about.layout, about.settings)
    except PipelineError:
        raise
    except Exception as error:  # Serve raises all kinds of things while it comes and goes
        raise PipelineError(f"there is no pipeline now: {type(error).__name__}: {error}") from error


class RememberingPlanner:
    """Plans with the pipeline; while that can't be asked, with what the model's settings were known to be."""

    def __init__(self, pipeline: LastingPipeline, notices: Notices) -> None:
        self._pipeline, self._notices = pipeline, notices

    async def plan(self, request: GenerationRequest) -> ResolvedRequest:
        """Return a request with nothing left open; raises `InvalidRequest`, `NotReady`."""
        try:
            return await self._pipeline.plan(request)
        except NotReady as error:
            known = await asyncio.to_thread(self._notices.read, KNOWN)
            if not known:
                raise
            told(log, "planned without the pipeline", logging.WARNING, reason=str(error))
            found = json.loads(known[0].content)
            return await FixedPlanner(Defaults(**found["defaults"]), tuple(found["tasks"])).plan(request)

    async def learn(self) -> None:
        """Write down what the model's settings are, as soon as the pipeline can be asked, and now and then again."""
        while True:
            try:
                await self._learn()
            except WanTpuError as error:
                told(log, "nothing known yet", reason=str(error))
                await asyncio.sleep(_LEARN_S)
            else:
                await asyncio.sleep(_REMIND_S)

    async def _learn(self) -> None:
        tasks, defaults = [], {}
        for task, image in (("t2v", None), ("i2v", Image.new("RGB", (16, 16)))):
            with contextlib.suppress(InvalidRequest):
                planned = await self._pipeline.plan(GenerationRequest(image=image))
                tasks.append(task)
                defaults = {field.name: getattr(planned, field.name) for field in dataclasses.fields(Defaults)}
        if tasks:
            content = json.dumps({"tasks": tasks, "defaults": defaults})
            await asyncio.to_thread(self._notices.tell, KNOWN, KNOWN, content)
