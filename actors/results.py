"""What a batch leaves beside its videos: a record for each request, and results.jsonl with all of them.

The record `clips/cat.json` of `clips/cat.mp4` is the truth: a request is done when its record says so and the video
has the size written there. results.jsonl is made from the records, and has a line for each line of the manifest.
"""

import dataclasses
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from actors.manifest import BadLine, Entry
from actors.storage import Storage

SUMMARY = "results.jsonl"
_READERS = 8  # records read at a time; the Google client keeps ten connections

Status = Literal["done", "writing", "failed", "changed", "invalid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How one line of the manifest ended.

    status   done; failed (`error` says why; made again by the next run); writing (its writer was killed);
             changed (done before from another line under this id, and kept); invalid (the line can't be carried out)
    output   where the video is, in full
    size_bytes  of the video
    seconds  from the start on this request to its video being written, waiting for slices included
    stage_s  stage -> seconds in which slices computed it
    request  digest of everything that decides the video
    model    what it was made with, where the driver was told
    """

    line: int
    status: Status
    id: str | None
    output: str | None = None
    size_bytes: int | None = None
    seconds: float | None = None
    stage_s: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None
    request: str | None = None
    model: str | None = None

    def to_line(self) -> bytes:
        """Return it as a line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False).encode() + b"\n"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run has to do, and what was found done."""

    todo: tuple[Entry, ...]
    kept: tuple[Result, ...]
    changed: tuple[Result, ...]
    blocked: tuple[Result, ...]  # somebody else's file has the name of the video or its record


def record_name(output: str) -> str:
    """Return the name of the record of a video."""
    return output.removesuffix(".mp4") + ".json"


def invalid(bad: BadLine) -> Result:
    """Return the result of a line that can't be carried out."""
    return Result(line=bad.line, id=bad.id, status="invalid", error=f"line {bad.line} {bad.reason}")


def make_plan(storage: Storage, entries: Iterable[Entry], *, model: str | None, remake_changed: bool) -> Plan:
    """Compare requests with the records and videos that are there."""
    entries = tuple(entries)
    sizes = storage.list()
    recorded = [entry for entry in entries if record_name(entry.output) in sizes]
    with ThreadPoolExecutor(_READERS) as readers:
        read = readers.map(lambda entry: _read_record(storage, record_name(entry.output)), recorded)
        records = {entry.id: record for entry, record in zip(recorded, read, strict=True) if record is not None}
    todo: list[Entry] = []
    kept, changed, blocked = [], [], []
    for entry in entries:
        record = records.get(entry.id)
        size = sizes.get(entry.output)
        if record is None and (size is not None or record_name(entry.output) in sizes):
            blocked.append(_blocked(storage, entry, entry.output if size is not None else record_name(entry.output)))
        elif record is None or record["status"] != "done" or record["size_bytes"] != size:
            todo.append(entry)
        elif (what := _difference(record, entry, model)) is None:
            kept.append(_as_result(record, entry))
        elif remake_changed:
            todo.append(entry)
        else:
            error = f"line {entry.line} has another {what} than {storage.location(entry.output)} was made from, which "
            error += "is kept; give it a new id, or ask for changed ones to be made again"
            changed.append(dataclasses.replace(_as_result(record, entry), status="changed", error=error))
    return Plan(tuple(todo), tuple(kept), tuple(changed), tuple(blocked))


def publish(storage: Storage, output: str, video: bytes, result: Result) -> None:
    """Write a video and its record, so that a kill at any moment leaves it done, or to be made again.

    The record goes first: a video without one is somebody else's file, which no run writes over.
    """
    record = record_name(output)
    storage.write(record, dataclasses.replace(result, status="writing").to_line())
    storage.write(output, video)
    storage.write(record, result.to_line())


class Summary:
    """results.jsonl: lines are added as requests end, and the whole is put in the manifest's order at the end."""

    def __init__(self, storage: Storage, before: Iterable[Result]) -> None:
        self._storage = storage
        self._results = {result.line: result for result in before}

    def note(self, result: Result) -> None:
        """Take a result in; `write` writes it."""
        self._results[result.line] = result

    def add(self, result: Result) -> None:
        """Take a result in, and add its line; where nothing can be added to, `write` does it."""
        self.note(result)
        self._storage.append(SUMMARY, result.to_line())

    def write(self) -> None:
        """Write all lines."""
        self._storage.write(SUMMARY, b"".join(result.to_line() for result in self.results))

    @property
    def results(self) -> tuple[Result, ...]:
        """All results so far, in the manifest's order."""
        return tuple(self._results[line] for line in sorted(self._results))


def _read_record(storage: Storage, name: str) -> dict[str, Any] | None:
    """Return a record; None when the file is none of ours (ours are whole, or not there)."""
    try:
        record = json.loads(storage.read(name))
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"id", "status", "size_bytes", "request"} <= record.keys() else None


def _difference(record: dict[str, Any], entry: Entry, model: str | None) -> str | None:
    if record["id"] != entry.id:
        return "id"
    if record["request"] != entry.digest:
        return "request"
    if model is not None and record.get("model") not in (None, model):
        return "model"
    return None


def _as_result(record: dict[str, Any], entry: Entry) -> Result:
    known = {field.name for field in dataclasses.fields(Result)}
    return Result(**{name: value for name, value in record.items() if name in known} | {"line": entry.line})


def _blocked(storage: Storage, entry: Entry, name: str) -> Result:
    where = storage.location(name)
    error = f"{where} exists, and no record says that a batch made it; move it away, or give the line another output"
    return Result(line=entry.line, id=entry.id, status="failed", error=error, request=entry.digest)
