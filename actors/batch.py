"""Carry out a manifest: bounded in flight, a result for each line, and what was done before is not done again."""

import asyncio
import dataclasses
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Protocol

from tqdm import tqdm

from actors import interrupts
from actors.manifest import Entry, Manifest
from actors.results import SUMMARY, Plan, Result, Summary, invalid, make_plan, publish, record_name
from actors.storage import Storage, StorageError
from actors.timeline import Span
from wan_tpu.errors import InvalidInput, InvalidRequest, WanTpuError
from wan_tpu.progress import Bar, Progress, Silent
from wan_tpu.request import GenerationRequest

OnEvent = Callable[[Span], object]


class Engine(Protocol):
    """Whatever makes videos: the pipeline on a cluster, or `actors.one_process.OneProcessEngine`."""

    async def generate(self, request: GenerationRequest, *, id: str, on_event: OnEvent) -> bytes:  # noqa: A002
        """Return the mp4 of a request; `on_event` is told spans as they end, from any thread."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How a batch is run.

    in_flight       requests handed to the engine at a time; what is beyond stays unread
    remake_changed  make a video again, over the old one, when its line or the model has changed since
    model           what the videos are made with, noted in results and compared when a batch is run again
    """

    in_flight: int = 4
    remake_changed: bool = False
    model: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= 10_000:
            raise InvalidRequest(f"in_flight is {self.in_flight}; allowed are 1 to 10000")


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """How a batch ended.

    results  one for each line of the manifest, in its order
    made     how many videos this run made; what else is done was done before
    problem  why results.jsonl couldn't be written, if so
    """

    results: tuple[Result, ...]
    made: int
    seconds: float
    problem: str | None = None

    def count(self, status: str) -> int:
        """Return how many lines ended so."""
        return sum(result.status == status for result in self.results)

    @property
    def exit_code(self) -> int:
        """0: every line's video is there; 2: no line could be carried out; 1: anything else."""
        if self.count("invalid") == len(self.results):
            return 2
        return 0 if self.count("done") == len(self.results) and self.problem is None else 1

    def check(self) -> None:
        """Raise with that exit code unless it is 0."""
        if self.exit_code:
            raise (InvalidInput if self.exit_code == 2 else BatchIncomplete)(self.text())

    def text(self) -> str:
        """Return the counts as one line."""
        counts = [f"{self.made} made"]
        if before := self.count("done") - self.made:
            counts.append(f"{before} done before")
        words = {"failed": "failed", "changed": "changed since and kept", "invalid": "bad lines"}
        counts += [f"{self.count(status)} {said}" for status, said in words.items() if self.count(status)]
        return f"{len(self.results)} requests: {', '.join(counts)}; {self.seconds:.1f} s"


class BatchIncomplete(WanTpuError):
    """Some requests of a batch have no video."""


def say(text: str) -> None:
    """Print a line on stderr, above a progress bar if there is one."""
    tqdm.write(text, file=sys.stderr)


async def run_batch(
    manifest: Manifest,
    output: Storage,
    engine: Engine,
    settings: BatchSettings | None = None,
    *,
    progress: Progress | None = None,
    on_event: OnEvent | None = None,
    tell: Callable[[str], object] = say,
) -> BatchReport:
    """Make every video of a manifest that isn't in the output yet.

    progress  `Console(unit="request")` shows a bar over the requests, with what is left of the time
    on_event  is told every span of every request, from any thread
    tell      is told, in one line each, what can't be done or has failed

    Raises `StorageError` before any work when the output can't be written to, or another process writes there. When
    cancelled, it ends what is being written, leaves results.jsonl in order, and raises `CancelledError`.
    """
    settings = settings or BatchSettings()
    start = time.monotonic()
    await asyncio.to_thread(output.probe)
    names = [name for entry in manifest.entries for name in (entry.output, record_name(entry.output))]
    with output.claim([*names, SUMMARY]):
        look = partial(make_plan, model=settings.model, remake_changed=settings.remake_changed)
        plan = await asyncio.to_thread(look, output, manifest.entries)
        bad = [invalid(line) for line in manifest.bad]
        for result in (*bad, *plan.changed, *plan.blocked):
            tell(f"{result.id or 'no id'}: {result.error}")
        summary = Summary(output, [*bad, *plan.kept, *plan.changed, *plan.blocked])
        summary.write()
        run = _Run(output, engine, settings, summary, on_event, tell)
        problem = None
        try:
            await run.all(plan, progress or Silent())
        finally:
            try:
                summary.write()
            except StorageError as error:
                problem = str(error)
                tell(problem)
    return BatchReport(summary.results, run.made, time.monotonic() - start, problem)


def drive(batch: Coroutine[None, None, BatchReport]) -> BatchReport:
    """Run a batch to its end. SIGTERM (what `ray job stop` sends) ends it as Ctrl-C does: `KeyboardInterrupt`."""
    return interrupts.run(batch)


class _Run:
    """The requests of one run, on their way."""

    def __init__(
        self,
        output: Storage,
        engine: Engine,
        settings: BatchSettings,
        summary: Summary,
        on_event: OnEvent | None,
        tell: Callable[[str], object],
    ) -> None:
        self.made = 0
        self._output, self._engine, self._settings, self._summary = output, engine, settings, summary
        self._on_event, self._tell = on_event, tell
        self._doubtful = False  # the last attempt to write has failed

    async def all(self, plan: Plan, progress: Progress) -> None:
        """Make what is to be made."""
        if not plan.todo:
            return
        waiting = iter(plan.todo)
        bar = progress.bar("batch", len(plan.todo))
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(self._settings.in_flight, len(plan.todo))):
                    workers.create_task(self._work(waiting, bar))
        finally:
            bar.close()

    async def _work(self, waiting: Iterator[Entry], bar: Bar) -> None:
        for entry in waiting:
            result = await self._one(entry)
            if result.error is not None:
                self._tell(f"{entry.id}: {result.error}")
            try:
                self._summary.add(result)
            except StorageError as error:
                self._tell(f"{entry.id}: {error}")
            bar.step()

    async def _one(self, entry: Entry) -> Result:
        """Make one video; whatever goes wrong with it is its result, and no other request's concern."""
        start = time.monotonic()
        result = Result(
            line=entry.line,
            id=entry.id,
            status="done",
            output=self._output.location(entry.output),
            request=entry.digest,
            model=self._settings.model,
        )
        stage_s: dict[str, float] = defaultdict(float)

        def note(span: Span) -> None:
            if span.what == "compute":
                stage_s[span.stage] += span.seconds
            if self._on_event is not None:
                self._on_event(span)

        try:
            if self._doubtful:  # no chip-hours for a video that has no place to go
                await asyncio.to_thread(self._output.probe)
                self._doubtful = False
            request = await asyncio.to_thread(entry.request)
            video = await self._engine.generate(request, id=entry.id, on_event=note)
            if video[4:8] != b"ftyp":
                raise ValueError(f"the engine returned {len(video)} bytes that are no mp4")
            times = {name: round(seconds, 4) for name, seconds in stage_s.items()}
            seconds = round(time.monotonic() - start, 4)
            result = dataclasses.replace(result, size_bytes=len(video), seconds=seconds, stage_s=times)
            await self._publish(entry, video, result)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error: Exception = RuntimeError("the engine cancelled it, and nobody else did")
        except Exception as raised:
            error = raised
        else:
            return result
        self._doubtful = self._doubtful or isinstance(error, StorageError)
        seconds = round(time.monotonic() - start, 4)
        result = dataclasses.replace(result, status="failed", error=_reason(error), size_bytes=None, seconds=seconds)
        await self._record_failure(entry, result)
        return result

    async def _publish(self, entry: Entry, video: bytes, result: Result) -> None:
        """Write video and record in a thread; when cancelled meanwhile, end that first."""
        writing = asyncio.ensure_future(asyncio.to_thread(publish, self._output, entry.output, video, result))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            if writing.exception() is None:
                self._summary.note(result)
            raise
        self.made += 1

    async def _record_failure(self, entry: Entry, result: Result) -> None:
        try:
            await asyncio.to_thread(self._output.write, record_name(entry.output), result.to_line())
        except StorageError:
            self._doubtful = True  # the result itself is told, and stays in the report


def _reason(error: Exception, most: int = 1000) -> str:
    """Return an error as one line: our own as it is, others with their kind; of long ones both ends."""
    text = " ... ".join(dict.fromkeys(line.strip() for line in (str(error).splitlines() or [""]) if line.strip()))
    if not isinstance(error, WanTpuError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
