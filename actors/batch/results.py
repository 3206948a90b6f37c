"""What a batch leaves beside its videos: a record for each request, and results.jsonl with all of them.

The record `clips/cat.json` of `clips/cat.mp4` is the truth: a request is done when its record says so and the video
has the size written there. results.jsonl is made from the records, and has a line for each line of the manifest.
"""

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from actors.batch.manifest import Entry
from actors.storage.base import Storage

RESULTS = "results.jsonl"
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
    warnings what the maker of the video should know of it, such as that its prompt was cut
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
    warnings: list[str] = dataclasses.field(default_factory=list)
    request: str | None = None
    model: str | None = None

    def to_line(self) -> bytes:
        """Return it as a line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False).encode() + b"\n"


def record_name(output: str) -> str:
    """Return the name of the record of a video."""
    return output.removesuffix(".mp4") + ".json"


def make_plan(
    storage: Storage, entries: Sequence[Entry], *, model: str | None, remake_changed: bool
) -> tuple[list[Entry], list[Result]]:
    """Compare requests with the records and videos that are there; return what is to be made, and the other results.

    Those with an `error` have changed since, or somebody else's file has the name of the video or its record.
    """
    sizes = storage.list()
    names = [record_name(entry.output) for entry in entries]
    with ThreadPoolExecutor(_READERS) as readers:
        records = readers.map(lambda name: _read_record(storage, name) if name in sizes else None, names)
    todo: list[Entry] = []
    settled: list[Result] = []
    for entry, name, record in zip(entries, names, records, strict=True):
        size = sizes.get(entry.output)
        if record is None and (size is not None or name in sizes):
            where = storage.location(name if size is None else entry.output)
            error = f"{where} exists, and no record says that a batch made it; move it away, or give the line another "
            error += "output"
            settled.append(Result(line=entry.line, id=entry.id, status="failed", error=error, request=entry.digest))
        elif record is None or record.status != "done" or record.size_bytes != size:
            todo.append(entry)
        elif (what := _difference(record, entry, model)) is None:
            settled.append(dataclasses.replace(record, line=entry.line))
        elif remake_changed:
            todo.append(entry)
        else:
            error = f"line {entry.line} has another {what} than {storage.location(entry.output)} was made from, which "
            error += "is kept; give it a new id, or ask for changed ones to be made again"
            settled.append(dataclasses.replace(record, line=entry.line, status="changed", error=error))
    return todo, settled


def publish(storage: Storage, output: str, video: bytes, result: Result) -> None:
    """Write a video and its record, so that a kill at any moment leaves it done, or to be made again.

    The record goes first: a video without one is somebody else's file, which no run writes over.
    """
    record = record_name(output)
    storage.write(record, dataclasses.replace(result, status="writing").to_line())
    storage.write(output, video)
    storage.write(record, result.to_line())


def _read_record(storage: Storage, name: str) -> Result | None:
    """Return a record; None when the file is none of ours (ours are whole, or not there)."""
    try:
        return Result(**json.loads(storage.read(name)))
    except (ValueError, TypeError):
        return None


def _difference(record: Result, entry: Entry, model: str | None) -> str | None:
    if record.id != entry.id:
        return "id"
    if record.request != entry.digest:
        return "request"
    if model is not None and record.model not in (None, model):
        return "model"
    return None
