"""Carry out a manifest: bounded in flight, a result for each line, and what was done before is not done again."""

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from tqdm import tqdm

from actors import interrupts
from actors.batch.manifest import Entry, Manifest, shortened
from actors.batch.results import RESULTS, Result, make_plan, publish, record_name
from actors.engine import Engine, GeneratedVideo, OnEvent
from actors.observe.span import Span
from actors.storage.base import Storage, StorageError
from wan_tpu.errors import InvalidInput, InvalidRequest, WanTpuError
from wan_tpu.progress import Bar, Progress, Silent

RESULTS_S = 5.0  # between two writes of results.jsonl, while requests end

Tell = Callable[[str], object]


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


@contextlib.contextmanager
def open_batch(
    manifest: Manifest,
    output: Storage,
    *,
    in_flight: int = 4,
    remake_changed: bool = False,
    model: str | None = None,
    tell: Tell = say,
) -> Iterator["Batch"]:
    """Hold an output for one run of a manifest, and find out what is to be done: before any engine is needed.

    in_flight       requests handed to the engine at a time; what is beyond stays unread
    remake_changed  make a video again, over the old one, when its line or the model has changed since
    model           what the videos are made with, noted in results and compared when a batch is run again
    tell            is told, in one line each, what can't be done or has failed

    Raises `StorageError` when the output can't be written to, or another process writes there.
    """
    if not 1 <= in_flight <= 10_000:
        raise InvalidRequest(f"in_flight is {in_flight}; allowed are 1 to 10000")
    start = time.monotonic()
    output.probe()
    names = [name for entry in manifest.entries for name in (entry.output, record_name(entry.output))]
    with output.claim([*names, RESULTS]):
        todo, found = make_plan(output, manifest.entries, model=model, remake_changed=remake_changed)
        bad = [
            Result(line=line.line, id=line.id, status="invalid", error=f"line {line.line} {line.reason}")
            for line in manifest.bad
        ]
        results = {result.line: result for result in [*bad, *found]}
        for result in results.values():
            if result.error is not None:
                tell(f"{result.id or 'no id'}: {result.error}")
        batch = Batch(output, in_flight, model, todo, results, tell, start)
        batch.write_results()
        yield batch


@dataclasses.dataclass
class Batch:
    """The requests of one run.

    todo     what is to be made; where it is empty, no engine is needed
    results  how lines of the manifest have ended so far, by number
    made     how many videos this run has made
    """

    output: Storage
    in_flight: int
    model: str | None
    todo: list[Entry]
    results: dict[int, Result]
    tell: Tell
    start_s: float
    made: int = 0
    written_s: float = 0.0  # time.monotonic() when results.jsonl was last written
    write_failed: bool = False  # the last attempt to write a video

    def run(
        self, engine: Engine | None, *, progress: Progress | None = None, on_event: OnEvent = lambda span: None
    ) -> BatchReport:
        """Make what is to be made; return how every line of the manifest ended.

        engine    may be None where nothing is to be made
        progress  `Console(unit="request")` shows a bar over the requests, with what is left of the time
        on_event  is told every span of every request, from any thread

        Ctrl-C and SIGTERM, which `ray job stop` sends, end what is being written, put results.jsonl in order, and
        raise `KeyboardInterrupt`.
        """
        problem = None
        bar = (progress if progress and self.todo else Silent()).bar("batch", len(self.todo))
        try:
            if engine is not None:
                interrupts.run(self._all(engine, bar, on_event))
        finally:
            bar.close()
            try:
                self.write_results()
            except StorageError as error:
                problem = str(error)
                self.tell(problem)
        return BatchReport(self._in_order(), self.made, time.monotonic() - self.start_s, problem)

    def write_results(self) -> None:
        """Write results.jsonl anew, in the manifest's order."""
        self.written_s = time.monotonic()
        self.output.write(RESULTS, b"".join(result.to_line() for result in self._in_order()))

    def _in_order(self) -> tuple[Result, ...]:
        return tuple(self.results[line] for line in sorted(self.results))

    async def _all(self, engine: Engine, bar: Bar, on_event: OnEvent) -> None:
        waiting = iter(self.todo)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self.in_flight, len(self.todo))):
                tasks.create_task(self._work(waiting, bar, engine, on_event))

    async def _work(self, waiting: Iterator[Entry], bar: Bar, engine: Engine, on_event: OnEvent) -> None:
        for entry in waiting:
            result = await self._one(entry, engine, on_event)
            for text in [*result.warnings, *([] if result.error is None else [result.error])]:
                self.tell(f"{entry.id}: {text}")
            self.results[entry.line] = result
            if time.monotonic() > self.written_s + RESULTS_S:
                try:
                    self.write_results()
                except StorageError as error:
                    self.tell(f"{entry.id}: {error}")
            bar.step()

    async def _one(self, entry: Entry, engine: Engine, on_event: OnEvent) -> Result:
        """Make one video; whatever goes wrong with it is its result, and no other request's concern."""
        start = time.monotonic()
        result = Result(
            line=entry.line,
            id=entry.id,
            status="done",
            output=self.output.location(entry.output),
            request=entry.digest,
            model=self.model,
        )
        try:
            if self.write_failed:  # no chip-hours for a video that has no place to go
                await asyncio.to_thread(self.output.probe)
                self.write_failed = False
            video, stage_s = await _made(entry, engine, on_event)
            result = dataclasses.replace(
                result,
                size_bytes=len(video.mp4),
                seconds=round(time.monotonic() - start, 4),
                stage_s=stage_s,
                warnings=list(video.warnings),
            )
            await self._publish(entry, video.mp4, result)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error: Exception = RuntimeError("the engine cancelled it, and nobody else did")
        except Exception as raised:
            error = raised
        else:
            return result
        self.write_failed |= isinstance(error, StorageError)
        seconds = round(time.monotonic() - start, 4)
        result = dataclasses.replace(result, status="failed", error=_reason(error), size_bytes=None, seconds=seconds)
        try:
            await asyncio.to_thread(self.output.write, record_name(entry.output), result.to_line())
        except StorageError:
            self.write_failed = True  # the result itself is told, and stays in the report
        return result

    async def _publish(self, entry: Entry, video: bytes, result: Result) -> None:
        """Write video and record in a thread; when cancelled meanwhile, end that first."""
        writing = asyncio.ensure_future(asyncio.to_thread(publish, self.output, entry.output, video, result))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            if writing.exception() is None:
                self.results[entry.line] = result
            raise
        self.made += 1


async def _made(entry: Entry, engine: Engine, on_event: OnEvent) -> tuple[GeneratedVideo, dict[str, float]]:
    """Return a video, and the seconds in which slices computed each stage."""
    stage_s: dict[str, float] = defaultdict(float)

    def note(span: Span) -> None:
        if span.what == "compute":
            stage_s[span.stage] += span.seconds
        on_event(span)

    plan = await asyncio.to_thread(entry.loaded)
    video = await engine.generate(plan, id=entry.id, on_event=note)
    if video.mp4[4:8] != b"ftyp":
        raise ValueError(f"the engine returned {len(video.mp4)} bytes that are no mp4")
    return video, {stage: round(seconds, 4) for stage, seconds in stage_s.items()}


def _reason(error: Exception) -> str:
    """Return an error as one line: our own as it is, others with their kind; of long ones both ends."""
    text = " ... ".join(dict.fromkeys(line.strip() for line in (str(error).splitlines() or [""]) if line.strip()))
    if not isinstance(error, WanTpuError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return shortened(text, 1000)
