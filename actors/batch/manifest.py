"""Read requests.jsonl, which has one request per line as a JSON object. Bad lines don't stop the others.

A line has the fields of `GenerationRequest`, and
    prompt  is needed; it may be empty
    id      names the request in results and logs; if omitted, it is derived from the line, the same each time
    image, last_image, references, video  local paths, or addresses in gs:// or s3://; relative ones start at the
            manifest's folder; every host of the encoder has the local files of references and video
    loras   relative paths may be below that folder, too
    next_prompts, continue_by  segments that continue the video, and how
    output  the mp4's name in the output folder; "<id>.mp4" if omitted

Whatever lines have in common is planned, stored and read only once. Neither the work on a line nor its memory grows
with the number of earlier lines.
"""

import dataclasses
import io
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actors.batch.inputs import (
    Picture,
    explain,
    read_bytes,
    read_files,
    read_picture,
    resolve_adapter,
    resolve_image,
    resolve_reference,
)
from actors.batch.lines import (
    EXAMPLE,
    RESULTS,
    ParsedLine,
    compute_digest,
    name_line,
    parse_object,
    record_name,
    shorten,
)
from wan_tpu.errors import InvalidInput, WanTpuError
from wan_tpu.identity import Source, identify
from wan_tpu.plan import RequestPlan
from wan_tpu.request import IMAGES, GenerationRequest
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.segments import check_segments
from wan_tpu.spec import ModelSpec
from wan_tpu.storage.addresses import absolute, is_bucket, split_location

_READERS = 4  # Files read at a time: enough to hide a bucket's latency, few enough to hold in memory.
_CHUNK = 1000  # Lines whose files are read together.
_TEXTS = ("prompt", "negative_prompt", "seed")  # Fields that only a plan's own texts and seed depend on.
_IN_BUCKETS = "files_in_buckets"  # What decides a video beside its fields: digests of its video and references there.
_NO_IMAGES: Mapping[str, Picture] = MappingProxyType({})
_MAX_SETTINGS = 4096  # Distinct settings remembered; lines usually differ only in texts, seeds and files.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LineSettings:
    """The common part of lines that differ only in texts, seeds and images of the same size."""

    model: ModelSpec
    fields: Mapping[str, Any]  # The fields of `GenerationRequest` that the lines share.
    decides: Mapping[str, Any]  # The same fields as plain JSON values.
    sources: tuple[Source, ...]  # Local files of video and references, and the adapters, including those of a preset.

    def plan(self, texts: Mapping[str, Any], images: Mapping[str, Picture]) -> RequestPlan:
        """Return the plan of a request with these settings, without its images; raises `WanTpuError`."""
        fields, digests = read_files(self.fields)
        if digests != self.decides.get(_IN_BUCKETS, []):
            raise InvalidInput("its video or a reference has changed since the manifest was read; run the batch again")
        return _plan(self.model, GenerationRequest(**fields, **texts), images)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entry:
    """A valid line. A million of them take half a gigabyte, so they share whatever they can."""

    line: int  # The line's number, from 1.
    id: str
    output: str  # Name of the mp4 in the output folder.
    prompt: str
    negative_prompt: str | None
    seed: int
    images: Mapping[str, Picture]
    settings: LineSettings
    digest: str  # Digest of everything in the line that decides the video, including the images' bytes.
    next_prompts: tuple[str, ...] = ()  # Of segments that continue the video.
    continue_by: str | None = None  # How they do, one of `wan_tpu.segments.WAYS`; None for the model's way.

    @property
    def plan(self) -> RequestPlan:
        """The request's plan, without its images. It is computed anew each time."""
        texts = {"prompt": self.prompt, "negative_prompt": self.negative_prompt, "seed": self.seed}
        return self.settings.plan(texts, self.images)

    def load(self) -> RequestPlan:
        """Return the plan with its images, read now; raises `WanTpuError` if a file is gone or has changed."""
        for source in self.settings.sources:
            source.check()
        images = {field: picture.load(field) for field, picture in self.images.items()}
        return self.plan.with_images(**images)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """An invalid line, and why it is invalid."""

    line: int  # The line's number, from 1.
    id: str | None
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All lines of a manifest in order, except blank ones."""

    entries: tuple[Entry, ...]
    bad: tuple[BadLine, ...]


def read_manifest(
    location: str | Path, model: ModelSpec, check_adapter: Callable[[RequestedAdapter], object] = lambda adapter: None
) -> Manifest:
    """Read, check and plan every line, images included.

    Args:
        model: The model, which may not be able to make what a line requests.
        check_adapter: Called once with each adapter; raises `WanTpuError` if that doesn't fit the model.

    Raises:
        StorageError: The manifest can't be read.
        InvalidInput: The manifest has no line.
        Unavailable: A bucket that has an adapter doesn't answer.
    """
    folder, name = split_location(str(location))
    where = absolute(str(location))
    if not name:
        raise InvalidInput(f"{location} is a folder; give the path of a file with one JSON object per line")
    reader, names = _Reader(absolute(folder), model, check_adapter), _Names()
    entries: list[Entry] = []
    bad: list[BadLine] = []
    lines = ((number, line) for number, line in enumerate(_read_lines(where), 1) if line.strip())
    with ThreadPoolExecutor(_READERS) as threads:
        while chunk := list(itertools.islice(lines, _CHUNK)):
            # Of several valid lines with the same id or output, the first is kept.
            for item in reader.read(chunk, threads):
                if isinstance(item, Entry) and (reason := names.find_clash(item)) is not None:
                    bad.append(BadLine(line=item.line, id=item.id, reason=reason))
                elif isinstance(item, Entry):
                    names.add(item)
                    entries.append(item)
                else:
                    bad.append(item)
    if not entries and not bad:
        raise InvalidInput(f"{where} has no requests; write one JSON object per line, such as {EXAMPLE}")
    return Manifest(entries=tuple(entries), bad=tuple(bad))


class _Reader:
    """Turns lines into entries, and computes once what they share."""

    def __init__(self, folder: str, model: ModelSpec, check_adapter: Callable[[RequestedAdapter], object]) -> None:
        """Start relative paths at `folder`."""
        self._folder, self._model, self._check = folder, model, check_adapter
        self._checked: dict[RequestedAdapter, WanTpuError | None] = {}  # What was said of each adapter.
        self._checking = threading.Lock()
        self._pictures: dict[str, Picture | str] = {}  # By location; a string says why an image can't be read.
        self._sources: dict[str, Source | None] = {}  # By location.
        # By the text of the fields; a string says why they are invalid.
        self._settings: dict[str, Future[LineSettings | str]] = {}
        self._lock = threading.Lock()

    def read(self, lines: Iterable[tuple[int, bytes]], threads: Executor) -> Iterator[Entry | BadLine]:
        """Yield an entry or an error for each of some lines. Their files are read together, by `threads`."""
        parsed = [self._parse(number, line) for number, line in lines]
        places = (place for item in parsed if isinstance(item, tuple) for place in item[1].values())
        new_places = [place for place in dict.fromkeys(places) if place not in self._pictures]
        self._pictures.update(zip(new_places, threads.map(read_picture, new_places), strict=True))
        yield from threads.map(lambda item: item if isinstance(item, BadLine) else self._make_entry(*item), parsed)

    def _parse(self, number: int, line: bytes) -> tuple[ParsedLine, dict[str, str]] | BadLine:
        """Return a line's fields and the locations of its images."""
        values: dict[str, Any] = {}
        try:
            values = parse_object(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            parsed = name_line(number, values)
            fields, images = parsed.fields, [name for name in IMAGES if values.get(name) is not None]
            places = {name: resolve_image(fields.pop(name), self._folder) for name in images}
            if isinstance(fields.get("video"), str):
                fields["video"] = resolve_image(fields["video"], self._folder)
            if isinstance(fields.get("references"), list):
                fields["references"] = [resolve_reference(part, self._folder) for part in fields["references"]]
            if isinstance(fields.get("loras"), list):
                fields["loras"] = [resolve_adapter(adapter, self._folder) for adapter in fields["loras"]]
        except WanTpuError as error:
            id_ = values.get("id") if isinstance(values.get("id"), str) else None
            return BadLine(line=number, id=id_, reason=shorten(str(error), 500))
        return parsed, places

    def _make_entry(self, line: ParsedLine, places: dict[str, str]) -> Entry | BadLine:
        texts = {name: line.fields.pop(name) for name in _TEXTS if name in line.fields}
        try:
            images = {name: self._get_picture(place) for name, place in places.items()}
            request = GenerationRequest(**texts)
            settings = self._get_settings(line, texts, images)
            if prompts := line.segments.get("next_prompts"):
                first = fix_length(self._model, settings.plan(texts, images)).request
                check_segments(self._model, first, prompts, line.segments.get("continue_by"))
            if not request.prompt:  # Settings are planned once for all of their lines' texts.
                settings.plan(texts, images).check_prompt()
        except WanTpuError as error:
            id_ = line.id if line.names_itself else None
            return BadLine(line=line.number, id=id_, reason=shorten(str(error), 500))
        decides = {**settings.decides, **{name: getattr(request, name) for name in _TEXTS}}
        decides |= {name: picture.sha256 for name, picture in images.items()} | line.segments
        return Entry(
            line=line.number,
            id=line.id,
            output=line.output,
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            seed=request.seed,
            images=images or _NO_IMAGES,
            settings=settings,
            digest=compute_digest(decides),
            next_prompts=tuple(line.segments.get("next_prompts", ())),
            continue_by=line.segments.get("continue_by"),
        )

    def _get_picture(self, place: str) -> Picture:
        picture = self._pictures[place]
        if isinstance(picture, str):
            raise InvalidInput(picture)
        return picture

    def _get_settings(self, line: ParsedLine, texts: dict[str, Any], images: Mapping[str, Picture]) -> LineSettings:
        """Return the settings of a line, planned for the first line that has them."""
        sizes = [(name, picture.height, picture.width) for name, picture in images.items()]
        key = repr((line.fields, sizes))
        with self._lock:
            future = self._settings.get(key)
            if is_new := future is None:
                if len(self._settings) >= _MAX_SETTINGS:
                    self._settings.clear()
                future = self._settings[key] = Future()
        if is_new:
            try:
                future.set_result(self._plan(line, texts, images))
            except BaseException as error:
                future.set_exception(error)
                raise
        settings = future.result()
        if isinstance(settings, str):
            raise InvalidInput(settings)
        return settings

    def _plan(self, line: ParsedLine, texts: dict[str, Any], images: Mapping[str, Picture]) -> LineSettings | str:
        try:
            read, digests = read_files(line.fields)
            request = GenerationRequest(**read, **texts)
            plan = _plan(self._model, request, images)
            resolved = plan.request
            for adapter in resolved.loras:
                self._check_adapter(adapter)
        except WanTpuError as error:
            return str(error)
        files = resolved.video, *(reference.path for reference in resolved.references or ())
        paths = [adapter.path for adapter in resolved.loras]
        paths += [file for file in files if isinstance(file, str) and not is_bucket(file)]
        sources = [source for place in dict.fromkeys(paths) if (source := self._get_source(place)) is not None]
        decides = request.to_json() | ({_IN_BUCKETS: digests} if digests else {})
        return LineSettings(self._model, line.fields, decides, tuple(sources))

    def _check_adapter(self, adapter: RequestedAdapter) -> None:
        with self._checking:
            if adapter not in self._checked:
                try:
                    self._check(adapter)
                except WanTpuError as error:
                    self._checked[adapter] = error
                else:
                    self._checked[adapter] = None
            if (problem := self._checked[adapter]) is not None:
                raise problem

    def _get_source(self, place: str) -> Source | None:
        if place not in self._sources:
            self._sources[place] = identify(place)
        return self._sources[place]


class _Names:
    """The names that lines have taken."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}  # The line that has an id, by id.
        self._outputs: dict[str, int] = {}
        self._folders: set[str] = set()

    def find_clash(self, entry: Entry) -> str | None:
        """Return why an entry's names conflict with earlier ones, or None if they don't."""
        id_, output = entry.id, entry.output
        if (line := self._ids.get(id_)) is not None:
            return f"has the same id as line {line}, {id_!r}; give it another id (or another seed)"
        if (line := self._outputs.get(output)) is not None:
            return f"has the same output as line {line}, {output!r}; give it another output"
        within = any(self._is_file(folder) for folder in _list_folders(output))
        if within or output in self._folders or record_name(output) in self._folders:
            return f"has the output {output!r}, which would be both a file and a folder; give it another output"
        return None

    def add(self, entry: Entry) -> None:
        self._ids[entry.id] = self._outputs[entry.output] = entry.line
        self._folders.update(_list_folders(entry.output))

    def _is_file(self, name: str) -> bool:
        """Return whether a name is that of a video, a record or the results."""
        return name in self._outputs or name == RESULTS or f"{name.removesuffix('.json')}.mp4" in self._outputs


def _list_folders(name: str) -> Iterator[str]:
    """Yield the folders that contain a name: a and a/b for a/b/c.mp4."""
    end = name.find("/")
    while end >= 0:
        yield name[:end]
        end = name.find("/", end + 1)


def fix_length(model: ModelSpec, first: RequestPlan) -> RequestPlan:
    """Return the plan of a line's first segment: all of them have one length, even where the model chooses it."""
    if not first.has_open_length:
        return first
    frames = min(model.defaults.frames, first.request.frames)
    return model.plan(dataclasses.replace(first.request, frames=frames, max_seconds=None))


def _plan(model: ModelSpec, request: GenerationRequest, images: Mapping[str, Picture]) -> RequestPlan:
    leading = next((images[name] for name in IMAGES if name in images), None)
    size = None if leading is None else (leading.height, leading.width)
    return model.plan(request, image="image" in images, last="last_image" in images, picture=size)


def _read_lines(location: str) -> Iterator[bytes]:
    """Yield the lines of a manifest; raises `StorageError`."""
    if is_bucket(location):
        yield from io.BytesIO(read_bytes(location))
        return
    try:
        with open(location, "rb") as file:
            yield from file
    except (OSError, ValueError) as error:
        raise explain(error, location) from None
