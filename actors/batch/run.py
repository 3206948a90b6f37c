"""Carry out a manifest: bounded in flight, a result for each line, and what was done before is not done again."""

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from actors import interrupts
from actors.batch.attempt import Attempt, Output, run_to_end
from actors.batch.lines import RESULTS, record_name
from actors.batch.manifest import Entry, Manifest
from actors.batch.results import MadeWith, Result, Results, settle
from actors.engine import Engine, OnEvent
from wan_tpu.errors import InvalidInput, InvalidRequest, WanTpuError
from wan_tpu.progress import Bar, Progress, Silent
from wan_tpu.storage.base import Storage, StorageError

RESULTS_S = 5.0  # At least so long between two writes of results.jsonl while requests end,
RESULTS_SHARE = 0.05  # and writing it takes this part of the time at most.

Tell = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """How a batch ended.

    results  one for each line of the manifest, in its order
    made     how many videos this run made; what else is done was done before
    problem  why results.jsonl couldn't be written, if so
    """

    results: Results
    made: int
    seconds: float
    problem: str | None = None

    def count(self, status: str) -> int:
        """Return how many lines ended so."""
        return self.results.counts[status]

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
    precision: str | None = None,
    tell: Tell = say,
) -> Iterator["Batch"]:
    """Hold an output for one run of a manifest, and find out what is to be done: before any engine is needed.

    Args:
        manifest: The lines.
        output: Where videos and records go.
        in_flight: Requests handed to the engine at a time; what is beyond stays unread.
        remake_changed: Make a video again, over the old one, when its line or what makes it has changed since.
        model: What the videos are made with, noted in records and compared when a batch is run again.
        precision: Of the model, likewise.
        tell: Is told, in one line each, what can't be done or has failed.

    Raises:
        StorageError: The output can't be written to, or another process writes there.
        InvalidRequest: `in_flight` is out of range.
    """
    if not 1 <= in_flight <= 10_000:
        raise InvalidRequest(f"in_flight is {in_flight}; allowed are 1 to 10000")
    start = time.monotonic()
    output.probe()
    names = (name for entry in manifest.entries for name in (entry.output, record_name(entry.output)))
    with output.claim(itertools.chain(names, [RESULTS])):
        made_with = MadeWith(model, precision)
        batch = Batch(output, in_flight, made_with, tell, start, Results(_last_line(manifest)))
        for line in manifest.bad:
            error = f"line {line.line} {line.reason}"
            batch.settle(Result(line=line.line, id=line.id, status="invalid", error=error))
        for entry, result in settle(output, manifest.entries, made_with=made_with, remake_changed=remake_changed):
            if result is None:
                batch.todo.append(entry)
            else:
                batch.settle(result)
        batch.write_results()
        yield batch


@dataclasses.dataclass
class Batch:
    """The requests of one run.

    todo     what is to be made; where it is empty, no engine is needed
    results  how lines of the manifest have ended so far
    made     how many videos this run has made
    """

    output: Storage
    in_flight: int
    made_with: MadeWith
    tell: Tell
    start_s: float
    results: Results
    todo: list[Entry] = dataclasses.field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self._checked = Output(self.output)

    def settle(self, result: Result) -> None:
        """Take the result of a line, and tell what is wrong with it."""
        self.results.add(result)
        if result.error is not None:
            self.tell(f"{result.id or 'no id'}: {result.error}")

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
                interrupts.run(self._make_all(engine, bar, on_event))
        finally:
            bar.close()
            try:
                self.write_results()
            except StorageError as error:
                problem = str(error)
                self.tell(problem)
        return BatchReport(self.results, self.made, time.monotonic() - self.start_s, problem)

    def write_results(self) -> None:
        """Write results.jsonl anew, in the manifest's order; never on an event loop, since storage may be slow."""
        self.output.write(RESULTS, self.results.content())

    async def _make_all(self, engine: Engine, bar: Bar, on_event: OnEvent) -> None:
        waiting = iter(self.todo)
        async with asyncio.TaskGroup() as beside:
            writing = beside.create_task(self._keep_results_written())
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self.in_flight, len(self.todo))):
                    tasks.create_task(self._work(waiting, bar, engine, on_event))
            writing.cancel()

    async def _keep_results_written(self) -> None:
        """Write results.jsonl now and then while requests end: one at a time, for a small part of the time."""
        pause, written = RESULTS_S, len(self.results)
        while True:
            await asyncio.sleep(pause)
            if len(self.results) == written:
                continue
            start, written = time.monotonic(), len(self.results)
            try:
                await run_to_end(self.write_results)
            except StorageError as error:
                self.tell(str(error))
            pause = max(RESULTS_S, (time.monotonic() - start) / RESULTS_SHARE)

    async def _work(self, waiting: Iterator[Entry], bar: Bar, engine: Engine, on_event: OnEvent) -> None:
        for entry in waiting:
            attempt = Attempt(entry, self._checked, self.made_with)
            try:
                await attempt.run(engine, on_event)
            finally:
                if attempt.result is not None:  # also when cancelled while its video was being published
                    self._note(entry, attempt.result)
            bar.step()
            if attempt.is_over:
                await engine.forget(entry.id)

    def _note(self, entry: Entry, result: Result) -> None:
        self.made += result.status == "done"
        for warning in result.warnings:
            self.tell(f"{entry.id}: {warning}")
        self.settle(result)


def _last_line(manifest: Manifest) -> int:
    return max((lines[-1].line for lines in (manifest.entries, manifest.bad) if lines), default=0)
