"""Run a manifest: a bounded number of requests in flight, a result for each line, and no work done twice."""

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from actors import interrupts
from actors.batch.attempt import LineAttempt, Output, run_to_end
from actors.batch.lines import RESULTS, preview_name, record_name
from actors.batch.manifest import Entry, Manifest
from actors.batch.results import Provenance, Result, Results, settle
from actors.batch.segments import name_segment
from actors.engine import Engine, OnEvent
from wan_tpu.errors import InvalidInput, InvalidRequest, WanTpuError
from wan_tpu.progress import Bar, Progress, Silent
from wan_tpu.storage.base import Storage, StorageError

RESULTS_S = 5.0  # Minimum time between two writes of results.jsonl while requests end.
RESULTS_SHARE = 0.05  # Writing results.jsonl takes at most this share of the time.

Tell = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """The result of a batch."""

    results: Results  # One result for each line of the manifest, in order.
    videos_made: int  # How many videos this run made; others that are done were done before.
    seconds: float
    problem: str | None = None  # Why results.jsonl couldn't be written, if it couldn't.

    def count(self, status: str) -> int:
        return self.results.counts[status]

    @property
    def exit_code(self) -> int:
        """0 if every line has a video, 2 if every line is invalid, else 1."""
        if self.count("invalid") == len(self.results):
            return 2
        return 0 if self.count("done") == len(self.results) and self.problem is None else 1

    def check(self) -> None:
        """Raise an error that has the exit code, unless that is 0."""
        if self.exit_code:
            raise (InvalidInput if self.exit_code == 2 else BatchIncomplete)(self.summarize())

    def summarize(self) -> str:
        """Return the counts as one line of text."""
        counts = [f"{self.videos_made} made"]
        if before := self.count("done") - self.videos_made:
            counts.append(f"{before} done before")
        words = {"failed": "failed", "changed": "changed since and kept", "invalid": "bad lines"}
        counts += [f"{self.count(status)} {word}" for status, word in words.items() if self.count(status)]
        return f"{len(self.results)} requests: {', '.join(counts)}; {self.seconds:.1f} s"


class BatchIncomplete(WanTpuError):
    """Some requests of a batch have no video."""


def say(text: str) -> None:
    """Print a line to stderr, above the progress bar if there is one."""
    tqdm.write(text, file=sys.stderr)


@contextlib.contextmanager
def open_batch(
    manifest: Manifest,
    output: Storage,
    *,
    in_flight: int = 4,
    remake_changed: bool = False,
    previews: bool = False,
    model: str | None = None,
    precision: str | None = None,
    tell: Tell = say,
) -> Iterator["Batch"]:
    """Claim an output for one run of a manifest, and find out what is left to do, before any engine is needed.

    Args:
        in_flight: How many requests the engine has at a time. The inputs of later ones aren't read yet.
        remake_changed: Whether to replace a video whose line, or what makes it, has changed since.
        previews: Whether pictures of unfinished videos are written beside them.
        model: The checkpoint, which is noted in records and compared when a batch is run again.
        precision: The model's precision, which is treated likewise.
        tell: Called with one line of text for everything that can't be done or has failed.

    Raises:
        StorageError: The output can't be written to, or another process is writing to it.
        InvalidRequest: `in_flight` is out of range.
    """
    if not 1 <= in_flight <= 10_000:
        raise InvalidRequest(f"in_flight is {in_flight}; allowed: 1 to 10000")
    start = time.monotonic()
    output.probe()
    naming = (str, record_name, preview_name) if previews else (str, record_name)
    names = (name(entry.output) for entry in manifest.entries for name in naming)
    with output.claim(itertools.chain(names, [RESULTS])):
        provenance = Provenance(model, precision)
        batch = Batch(output, in_flight, provenance, previews, tell, start, Results(_find_last_line(manifest)))
        for line in manifest.bad:
            error = f"line {line.line} {line.reason}"
            batch.settle(Result(line=line.line, id=line.id, status="invalid", error=error))
        for entry, result in settle(output, manifest.entries, provenance=provenance, remake_changed=remake_changed):
            if result is None:
                batch.todo.append(entry)
            else:
                batch.settle(result)
        batch.write_results()
        yield batch


@dataclasses.dataclass
class Batch:
    """The requests of one run."""

    output: Storage
    in_flight: int
    provenance: Provenance
    previews: bool
    tell: Tell
    start_s: float
    results: Results  # How the manifest's lines have ended so far.
    # What is to be made. If it is empty, no engine is needed.
    todo: list[Entry] = dataclasses.field(default_factory=list)
    videos_made: int = 0

    def __post_init__(self) -> None:
        self._checked_output = Output(self.output)

    def settle(self, result: Result) -> None:
        """Record the result of a line, and report its error, if any."""
        self.results.add(result)
        if result.error is not None:
            self.tell(result.error if result.id is None else f"{result.id}: {result.error}")

    def run(
        self, engine: Engine | None, *, progress: Progress | None = None, on_event: OnEvent = lambda span: None
    ) -> BatchReport:
        """Make the videos that are missing, and return how every line of the manifest ended.

        On Ctrl-C and SIGTERM, which `ray job stop` sends, this finishes the files that are being written, writes
        results.jsonl and raises `KeyboardInterrupt`.

        Args:
            engine: Makes the videos; may be None if there is nothing to make.
            progress: `Console(unit="request")` shows a bar over the requests, with the remaining time.
            on_event: Called with every span of every request, from any thread.
        """
        problem = None
        bar = (progress if progress and self.todo else Silent()).bar("batch", len(self.todo))
        try:
            if engine is not None:
                interrupts.run(self._make_all(engine, bar, on_event))
        finally:
            bar.close()
            try:
                self.write_results()
            except StorageError as error:
                problem = str(error)
                self.tell(problem)
        return BatchReport(self.results, self.videos_made, time.monotonic() - self.start_s, problem)

    def write_results(self) -> None:
        """Rewrite results.jsonl in the manifest's order. Not for an event loop, since storage may be slow."""
        self.output.write(RESULTS, self.results.to_bytes())

    async def _make_all(self, engine: Engine, bar: Bar, on_event: OnEvent) -> None:
        waiting = iter(self.todo)
        async with asyncio.TaskGroup() as beside:
            writing = beside.create_task(self._keep_results_written())
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self.in_flight, len(self.todo))):
                    tasks.create_task(self._work(waiting, bar, engine, on_event))
            writing.cancel()

    async def _keep_results_written(self) -> None:
        """Write results.jsonl from time to time while requests end, for a small share of the time."""
        pause, count = RESULTS_S, len(self.results)
        while True:
            await asyncio.sleep(pause)
            if len(self.results) == count:
                continue
            start, count = time.monotonic(), len(self.results)
            try:
                await run_to_end(self.write_results)
            except StorageError as error:
                self.tell(str(error))
            pause = max(RESULTS_S, (time.monotonic() - start) / RESULTS_SHARE)

    async def _work(self, waiting: Iterator[Entry], bar: Bar, engine: Engine, on_event: OnEvent) -> None:
        for entry in waiting:
            attempt = LineAttempt(entry, self._checked_output, self.provenance, previews=self.previews)
            try:
                await attempt.run(engine, on_event)
            finally:
                if attempt.result is not None:  # Also if this was cancelled while the video was being published.
                    self._note(entry, attempt.result)
            bar.step()
            for segment in range(1 + len(entry.next_prompts)) if attempt.is_over else ():
                await engine.forget(name_segment(entry, segment))

    def _note(self, entry: Entry, result: Result) -> None:
        self.videos_made += result.status == "done"
        for warning in result.warnings:
            self.tell(f"{entry.id}: {warning}")
        self.settle(result)


def _find_last_line(manifest: Manifest) -> int:
    return max((lines[-1].line for lines in (manifest.entries, manifest.bad) if lines), default=0)
