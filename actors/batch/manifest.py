"""Read requests.jsonl: one JSON object a line, each a request; bad lines are told apart and don't stop the rest.

A line has the fields of `GenerationRequest`, and
    id      names the request in results and logs; derived from the line when left out, the same each time
    video   a local path that every host of the encoder has
    image, last_image  local paths or gs://; relative ones begin at the manifest's folder
    loras   those of relative paths may lie below that folder, too
    output  the mp4's name in the output folder; "<id>.mp4" when left out

What lines have in common is planned, kept and read once: the work on a line and what is kept of it don't grow with the
lines before it.
"""

import dataclasses
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from actors.batch.inputs import (
    Picture,
    explain,
    read_bytes,
    read_picture,
    resolve_adapter,
    resolve_image,
)
from actors.batch.lines import EXAMPLE, RESULTS, ParsedLine, digest_of, name_line, parse_object, record_name, shorten
from wan_tpu.errors import InvalidInput, WanTpuError
from wan_tpu.identity import Source, identify
from wan_tpu.plan import RequestPlan
from wan_tpu.request import IMAGES, GenerationRequest
from wan_tpu.storage.addresses import absolute, is_bucket, split_location

_READERS = 4  # Images read at a time: enough to hide the latency of gs://, few enough to hold in memory.
_CHUNK = 1000  # Lines whose images are read together.
_TEXTS = ("prompt", "negative_prompt", "seed")  # Fields that nothing about a plan depends on but its texts and seed.
_NO_IMAGES: Mapping[str, Picture] = MappingProxyType({})
_MAX_SETTINGS = 4096  # Distinct settings that are remembered; lines usually differ by their texts, seeds and files.


class Planner(Protocol):
    """Plans a request whose images needn't be there: `ModelSpec.plan`."""

    def __call__(
        self, request: GenerationRequest, *, image: bool, last: bool, picture: tuple[int, int] | None
    ) -> RequestPlan:
        """Return what the request takes; raises `InvalidRequest` where the model can't make it."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LineSettings:
    """What lines have in common that differ only by their texts, seeds and images of one size.

    fields   of `GenerationRequest`, without those that differ
    decides  the same fields as plain JSON values
    sources  video and adapters, those of a preset included
    """

    planner: Planner
    fields: Mapping[str, Any]
    decides: Mapping[str, Any]
    sources: tuple[Source, ...]

    def plan(self, texts: Mapping[str, Any], images: Mapping[str, Picture]) -> RequestPlan:
        """Return the plan of a request with these settings, without its images."""
        return _plan(self.planner, GenerationRequest(**self.fields, **texts), images)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entry:
    """A line that can be carried out; of a million there are half a gigabyte, so what it can share is shared.

    line    from 1
    output  name of the mp4 in the output folder
    images  by field
    digest  of everything in the line that decides the video, the images' bytes included
    """

    line: int
    id: str
    output: str
    prompt: str
    negative_prompt: str | None
    seed: int
    images: Mapping[str, Picture]
    settings: LineSettings
    digest: str

    @property
    def plan(self) -> RequestPlan:
        """What the request takes, without its images: made anew each time."""
        texts = {"prompt": self.prompt, "negative_prompt": self.negative_prompt, "seed": self.seed}
        return self.settings.plan(texts, self.images)

    def load(self) -> RequestPlan:
        """Return the plan, its images read now; raises `WanTpuError` if a file has gone meanwhile, or is another."""
        for source in self.settings.sources:
            source.check()
        images = {field: picture.load(field) for field, picture in self.images.items()}
        return self.plan.with_images(**images)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """A line that can't be carried out, and why."""

    line: int  # from 1
    id: str | None  # where the line gives one
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All lines of a manifest, in their order; blank ones are left out."""

    entries: tuple[Entry, ...]
    bad: tuple[BadLine, ...]


def read_manifest(location: str | Path, planner: Planner) -> Manifest:
    """Read, check and plan every line, images included.

    Args:
        location: Path or gs:// address of the manifest.
        planner: The model's `ModelSpec.plan`, which raises `InvalidRequest` where it can't make what a line asks for.

    Raises:
        StorageError: The manifest can't be read.
        InvalidInput: It has no line.
        Unavailable: A bucket with an adapter doesn't answer.
    """
    folder, name = split_location(str(location))
    where = absolute(str(location))
    if not name:
        raise InvalidInput(f"{location} is a folder; give the path of a file with one JSON line a request")
    reader, names = _Reader(absolute(folder), planner), _Names()
    entries: list[Entry] = []
    bad: list[BadLine] = []
    numbered = ((number, line) for number, line in enumerate(_lines(where), 1) if line.strip())
    with ThreadPoolExecutor(_READERS) as threads:
        while chunk := list(itertools.islice(numbered, _CHUNK)):
            for item in reader.read(chunk, threads):  # of several good lines with one id or output the first is kept
                if isinstance(item, Entry) and (reason := names.clash(item)) is not None:
                    bad.append(BadLine(line=item.line, id=item.id, reason=reason))
                elif isinstance(item, Entry):
                    names.add(item)
                    entries.append(item)
                else:
                    bad.append(item)
    if not entries and not bad:
        raise InvalidInput(f"{where} has no requests; write one JSON object a line, such as {EXAMPLE}")
    return Manifest(entries=tuple(entries), bad=tuple(bad))


class _Reader:
    """Makes entries of lines; what they share is made once."""

    def __init__(self, folder: str, planner: Planner) -> None:
        """folder: where relative paths begin."""
        self._folder, self._planner = folder, planner
        self._pictures: dict[str, Picture | str] = {}  # By location; a text says why it can't be read.
        self._sources: dict[str, Source | None] = {}  # By location.
        self._settings: dict[str, LineSettings | str] = {}  # By what is written; a text says why it can't be made.

    def read(self, lines: Iterable[tuple[int, bytes]], threads: Executor) -> Iterator[Entry | BadLine]:
        """Yield an entry, or what is wrong, for each of some lines; their images are read together, by `threads`."""
        parsed = [self._parse(number, line) for number, line in lines]
        places = (place for item in parsed if isinstance(item, tuple) for place in item[1].values())
        unread = [place for place in dict.fromkeys(places) if place not in self._pictures]
        self._pictures.update(zip(unread, threads.map(read_picture, unread), strict=True))
        for item in parsed:
            yield item if isinstance(item, BadLine) else self._entry(*item)

    def _parse(self, number: int, line: bytes) -> tuple[ParsedLine, dict[str, str]] | BadLine:
        """Return a line's fields, and where its images are."""
        given: dict[str, Any] = {}
        try:
            given = parse_object(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            parsed = name_line(number, given)
            fields, images = parsed.fields, [name for name in IMAGES if given.get(name) is not None]
            places = {name: resolve_image(fields.pop(name), self._folder) for name in images}
            if isinstance(fields.get("video"), str):
                fields["video"] = resolve_image(fields["video"], self._folder)
            if isinstance(fields.get("loras"), list):
                fields["loras"] = [resolve_adapter(lora, self._folder) for lora in fields["loras"]]
        except WanTpuError as error:
            id_ = given.get("id") if isinstance(given.get("id"), str) else None
            return BadLine(line=number, id=id_, reason=shorten(str(error), 500))
        return parsed, places

    def _entry(self, line: ParsedLine, places: dict[str, str]) -> Entry | BadLine:
        texts = {name: line.fields.pop(name) for name in _TEXTS if name in line.fields}
        try:
            images = {name: self._picture(place) for name, place in places.items()}
            request = GenerationRequest(**texts)
            settings = self._settings_of(line.fields, texts, images)
        except WanTpuError as error:
            id_ = line.id if line.names_itself else None
            return BadLine(line=line.number, id=id_, reason=shorten(str(error), 500))
        decides = {**settings.decides, **{name: getattr(request, name) for name in _TEXTS}}
        decides |= {name: picture.sha256 for name, picture in images.items()}
        return Entry(
            line=line.number,
            id=line.id,
            output=line.output,
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            seed=request.seed,
            images=images or _NO_IMAGES,
            settings=settings,
            digest=digest_of(decides),
        )

    def _picture(self, place: str) -> Picture:
        picture = self._pictures[place]
        if isinstance(picture, str):
            raise InvalidInput(picture)
        return picture

    def _settings_of(
        self, fields: dict[str, Any], texts: dict[str, Any], images: Mapping[str, Picture]
    ) -> LineSettings:
        """Return the settings of a line, planned when the first of them comes."""
        key = repr((fields, [(name, picture.height, picture.width) for name, picture in images.items()]))
        settings = self._settings.get(key)
        if settings is None:
            if len(self._settings) >= _MAX_SETTINGS:
                self._settings.clear()
            settings = self._settings[key] = self._plan(fields, texts, images)
        if isinstance(settings, str):
            raise InvalidInput(settings)
        return settings

    def _plan(self, fields: dict[str, Any], texts: dict[str, Any], images: Mapping[str, Picture]) -> LineSettings | str:
        try:
            request = GenerationRequest(**fields, **texts)
            resolved = _plan(self._planner, request, images).request
        except WanTpuError as error:
            return str(error)
        named = [lora.path for lora in resolved.loras] + ([] if resolved.video is None else [str(resolved.video)])
        sources = [source for place in dict.fromkeys(named) if (source := self._source(place)) is not None]
        return LineSettings(self._planner, fields, request.to_json(), tuple(sources))

    def _source(self, place: str) -> Source | None:
        if place not in self._sources:
            self._sources[place] = identify(place)
        return self._sources[place]


class _Names:
    """The names that lines have taken."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}  # The lines that have them.
        self._outputs: dict[str, int] = {}
        self._folders: set[str] = set()

    def clash(self, entry: Entry) -> str | None:
        """Return why an entry can't be beside earlier ones."""
        id_, output = entry.id, entry.output
        if (line := self._ids.get(id_)) is not None:
            return f"has the id {id_!r} of line {line}; give it another id (or another seed)"
        if (line := self._outputs.get(output)) is not None:
            return f"has the output {output!r} of line {line}; give it another"
        within = any(self._is_file(folder) for folder in _folders_of(output))
        if within or output in self._folders or record_name(output) in self._folders:
            return f"has the output {output!r}, which is a file and a folder; give it another"
        return None

    def add(self, entry: Entry) -> None:
        """Take the names of an entry."""
        self._ids[entry.id] = self._outputs[entry.output] = entry.line
        self._folders.update(_folders_of(entry.output))

    def _is_file(self, name: str) -> bool:
        """Return whether a name is that of a video, a record or the results."""
        return name in self._outputs or name == RESULTS or f"{name.removesuffix('.json')}.mp4" in self._outputs


def _folders_of(name: str) -> Iterator[str]:
    """Yield the folders that a name lies in: a and a/b of a/b/c.mp4."""
    end = name.find("/")
    while end >= 0:
        yield name[:end]
        end = name.find("/", end + 1)


def _plan(planner: Planner, request: GenerationRequest, images: Mapping[str, Picture]) -> RequestPlan:
    first = images.get("image")
    size = None if first is None else (first.height, first.width)
    return planner(request, image=first is not None, last="last_image" in images, picture=size)


def _lines(location: str) -> Iterator[bytes]:
    """Yield the lines of a manifest; raises `StorageError`."""
    if is_bucket(location):
        yield from io.BytesIO(read_bytes(location))
        return
    try:
        with open(location, "rb") as file:
            yield from file
    except (OSError, ValueError) as error:
        raise explain(error, location) from None
