"""A batch's records, one per request, and results.jsonl, which contains them all.

The record `clips/cat.json` of `clips/cat.mp4` is authoritative: a request is done when its record says so and the video
has the recorded size. results.jsonl is written from the records, and has a line for each line of the manifest.
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
_CHUNK = 1000  # Records read, or lines joined, at a time, which bounds memory.

Status = Literal["done", "writing", "failed", "changed", "invalid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one line of the manifest."""

    line: int  # The line's number, from 1.
    # "done"; "failed" (`error` says why, and the next run tries again); "writing" (its writer was killed); "changed"
    # (done before from another line with this id, and kept); "invalid" (the line can't be used).
    status: Status
    id: str | None
    output: str | None = None  # Full location of the video.
    size_bytes: int | None = None
    # From the start of work on this request until its video was written, including waits for slices.
    seconds: float | None = None
    stage_s: dict[str, float] = dataclasses.field(default_factory=dict)  # Seconds that slices computed, by stage.
    error: str | None = None
    # What the user should know about the video, such as that its prompt was cut.
    warnings: list[str] = dataclasses.field(default_factory=list)
    request: str | None = None  # Digest of everything in the line that decides the video.
    # The checkpoint, if the driver knows it: a folder's absolute path, an address in a bucket or a hub id.
    model: str | None = None
    precision: str | None = None  # The precision of the model's computation, if known.
    # Versions of the content of the request's video and adapters, where known.
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_line(self) -> bytes:
        return json.dumps(vars(self), ensure_ascii=False).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Result":
        """Parse a result's line; raises `ValueError` or `TypeError` if it isn't one."""
        return cls(**json.loads(line))


class Results(Sequence[Result]):
    """The results of a manifest's lines so far, in order.

    Each result is kept as its line of JSON: a million fit into half a gigabyte, and results.jsonl is ready to write.
    """

    def __init__(self, last_line: int) -> None:
        """Make room for the results of lines 1 to `last_line`."""
        self._lines: list[bytes | None] = [None] * (last_line + 1)
        self.counts: Counter[str] = Counter()

    def add(self, result: Result) -> None:
        """Add the result of a line that has none yet."""
        self._lines[result.line] = result.to_line()
        self.counts[result.status] += 1

    def to_bytes(self) -> bytes:
        """Return results.jsonl. This may run in a thread while results are added, and lets other threads run."""
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
class Provenance:
    """What makes a batch's videos, as noted in their records; None where unknown."""

    model: str | None = None  # The checkpoint: a folder's absolute path, an address in a bucket or a hub id.
    precision: str | None = None


def settle(
    storage: Storage, entries: Iterable[Entry], *, provenance: Provenance, remake_changed: bool
) -> Iterator[tuple[Entry, Result | None]]:
    """Compare requests with the records and videos that exist.

    Args:
        storage: The batch's output.
        provenance: What would make the videos. If a record has another one, the video has changed.
        remake_changed: Whether to make videos again that have changed.

    Yields:
        Each entry with its result, or with None if its video is still to be made. A result with an `error` has changed
        since, or somebody else's file has the name of the video or its record.
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
                    yield entry, _build_result_of_another(entry, where)
                elif record is None or record.status != "done" or record.size_bytes != size:
                    yield entry, None
                elif (part := _find_changed_part(record, entry, provenance)) is None:
                    yield entry, dataclasses.replace(record, line=entry.line)
                else:
                    yield entry, None if remake_changed else _make_changed(record, entry, part, storage)


def publish(storage: Storage, output: str, video: bytes, result: Result) -> None:
    """Write a video and its record so that, whenever this is killed, the video is either done or will be made again.

    The record goes first: a video without a record is somebody else's file, which no run overwrites.
    """
    record = record_name(output)
    storage.write(record, dataclasses.replace(result, status="writing").to_line())
    storage.write(output, video)
    storage.write(record, result.to_line())


def _read_record(storage: Storage, name: str) -> Result | None:
    """Return a record, or None if the file isn't one of ours (which are written whole or not at all)."""
    try:
        return Result.parse(storage.read(name))
    except (ValueError, TypeError):
        return None


def _build_result_of_another(entry: Entry, where: str) -> Result:
    """Return the result of a line whose video has the same name as somebody else's file."""
    error = f"{where} exists, but has no record of a batch beside it; move it away, or give the line another output"
    return Result(line=entry.line, id=entry.id, status="failed", error=error, request=entry.digest)


def _make_changed(record: Result, entry: Entry, part: str, storage: Storage) -> Result:
    error = f"line {entry.line} has another {part} than {storage.location(entry.output)} was made from, which is kept; "
    error += "give it a new id, or ask for changed ones to be made again"
    return dataclasses.replace(record, line=entry.line, status="changed", error=error)


def _find_changed_part(record: Result, entry: Entry, provenance: Provenance) -> str | None:
    """Return which part of a video's origin differs, if any. A part that either side doesn't know counts as equal."""
    if record.id != entry.id:
        return "id"
    if record.request != entry.digest:
        return "request"
    if None not in (record.model, provenance.model) and record.model != provenance.model:
        return "model"
    if None not in (record.precision, provenance.precision) and record.precision != provenance.precision:
        return "precision"
    for source in entry.settings.sources:
        if record.sources.get(source.location, source.version) != source.version:
            return f"content of {source.location}"
    return None
