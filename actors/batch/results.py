"""What a batch leaves beside its videos: a record for each request, and results.jsonl with all of them.

The record `clips/cat.json` of `clips/cat.mp4` is the truth: a request is done when its record says so and the video
has the size written there. results.jsonl is made from the records, and has a line for each line of the manifest.
"""

import dataclasses
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, overload

from actors.batch.lines import record_name
from actors.batch.manifest import Entry
from wan_tpu.storage.base import Storage

_READERS = 8  # Records read at a time; the Google client keeps ten connections.
_CHUNK = 1000  # Records read, or lines joined, at a time: what is under way stays small.

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
    request  digest of everything in the line that decides the video
    model    what it was made with, where the driver was told: a folder's absolute path, gs:// or a hub id
    precision  of the model's computation, likewise
    sources  video and adapters of the request -> the version of their content, where that is known
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
    precision: str | None = None
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_line(self) -> bytes:
        """Return it as a line of JSON."""
        return json.dumps(vars(self), ensure_ascii=False).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Result":
        """Return a result of its line; raises `ValueError` or `TypeError` for what is none."""
        return cls(**json.loads(line))


class Results(Sequence[Result]):
    """How lines of a manifest have ended so far, in its order.

    Each is kept as its line of JSON: a million fit into half a gigabyte, and results.jsonl is ready to be written.

    counts  how many have ended so, by status
    """

    def __init__(self, last_line: int) -> None:
        """last_line: of the manifest; lines count from 1."""
        self._lines: list[bytes | None] = [None] * (last_line + 1)
        self.counts: Counter[str] = Counter()

    def add(self, result: Result) -> None:
        """Take the result of a line that has none yet."""
        self._lines[result.line] = result.to_line()
        self.counts[result.status] += 1

    def content(self) -> bytes:
        """Return results.jsonl; may be called in a thread while results are added, and lets others run meanwhile."""
        content = io.BytesIO()
        for start in range(0, len(self._lines), _CHUNK):
            content.write(b"".join(filter(None, self._lines[start : start + _CHUNK])))
        return content.getvalue()

    def __len__(self) -> int:
        return self.counts.total()

    def __iter__(self) -> Iterator[Result]:
        return (Result.parse(line) for line in self._lines if line is not None)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> list[Result]: ...
    def __getitem__(self, index: Any) -> Any:
        lines = [line for line in self._lines if line is not None][index]
        return [Result.parse(line) for line in lines] if isinstance(index, slice) else Result.parse(lines)


@dataclasses.dataclass(frozen=True)
class MadeWith:
    """What makes a batch's videos, as their records have it; None where nobody says.

    model      a folder's absolute path, gs:// or a hub id
    precision  such as "bfloat16"
    """

    model: str | None = None
    precision: str | None = None


def settle(
    storage: Storage, entries: Iterable[Entry], *, made_with: MadeWith, remake_changed: bool
) -> Iterator[tuple[Entry, Result | None]]:
    """Compare requests with the records and videos that are there.

    Args:
        storage: The batch's output.
        entries: The lines that can be carried out.
        made_with: What would make the videos; another one than in a record is a change.
        remake_changed: Whether what has changed is to be made again.

    Yields:
        Each entry with its result, None where it is to be made. Those with an `error` have changed since, or somebody
        else's file has the name of the video or its record.
    """
    sizes, remaining = storage.list(), iter(entries)
    with ThreadPoolExecutor(_READERS) as readers:
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            names = [record_name(entry.output) for entry in chunk]
            present = [name for name in names if name in sizes]
            records = dict(zip(present, readers.map(lambda name: _read_record(storage, name), present), strict=True))
            for entry, name in zip(chunk, names, strict=True):
                record, size = records.get(name), sizes.get(entry.output)
                if record is None and (size is not None or name in sizes):
                    where = storage.location(name if size is None else entry.output)
                    yield entry, _result_of_another(entry, where)
                elif record is None or record.status != "done" or record.size_bytes != size:
                    yield entry, None
                elif (what := _difference(record, entry, made_with)) is None:
                    yield entry, dataclasses.replace(record, line=entry.line)
                else:
                    yield entry, None if remake_changed else _changed(record, entry, what, storage)


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
        return Result.parse(storage.read(name))
    except (ValueError, TypeError):
        return None


def _result_of_another(entry: Entry, where: str) -> Result:
    """Return the result of a line whose video's name somebody else's file has."""
    error = f"{where} exists, and no record says that a batch made it; move it away, or give the line another output"
    return Result(line=entry.line, id=entry.id, status="failed", error=error, request=entry.digest)


def _changed(record: Result, entry: Entry, what: str, storage: Storage) -> Result:
    error = f"line {entry.line} has another {what} than {storage.location(entry.output)} was made from, which is kept; "
    error += "give it a new id, or ask for changed ones to be made again"
    return dataclasses.replace(record, line=entry.line, status="changed", error=error)


def _difference(record: Result, entry: Entry, made_with: MadeWith) -> str | None:
    """Return what differs from what a video was made from. What either side doesn't know is no difference."""
    if record.id != entry.id:
        return "id"
    if record.request != entry.digest:
        return "request"
    if None not in (record.model, made_with.model) and record.model != made_with.model:
        return "model"
    if None not in (record.precision, made_with.precision) and record.precision != made_with.precision:
        return "precision"
    for source in entry.settings.sources:
        if record.sources.get(source.location, source.version) != source.version:
            return f"content of {source.location}"
    return None
