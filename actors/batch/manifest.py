"""Read requests.jsonl: one JSON object a line, each a request; bad lines are told apart and don't stop the rest.

A line has the fields of `GenerationRequest`, and
    id      names the request in results and logs; derived from the line when left out, the same each time
    video   a local path that every host of the encoder has
    image, last_image  local paths or gs://; relative ones begin at the manifest's folder
    loras   those of relative paths may lie below that folder, too
    output  the mp4's name in the output folder; "<id>.mp4" when left out
"""

import dataclasses
import difflib
import hashlib
import io
import json
import os
import posixpath
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from actors.storage.base import GCS_SCHEME, StorageError, name_problem
from actors.storage.opening import absolute, open_storage, split_location
from wan_tpu.errors import InvalidInput, WanTpuError
from wan_tpu.lora import lora_of
from wan_tpu.media.image import decode_image, load_image
from wan_tpu.request import IMAGES, GenerationRequest
from wan_tpu.spec import RequestPlan

Planner = Callable[[GenerationRequest], RequestPlan]

_REQUEST_FIELDS = tuple(field.name for field in dataclasses.fields(GenerationRequest))
_FIELDS = ("id", "output", *_REQUEST_FIELDS)
_READERS = 4  # images read at a time: enough to hide the latency of gs://, few enough to hold in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A line that can be carried out. Its images are read when it is used: a thousand would not fit in memory."""

    line: int  # from 1
    id: str
    output: str  # name of the mp4 in the output folder
    plan: RequestPlan  # without its images
    images: dict[str, tuple[str, str]]  # field -> absolute path or gs://, SHA-256 of the file when it was read
    digest: str  # of everything that decides the video, the images' bytes included

    def loaded(self) -> RequestPlan:
        """Return the plan, its images read now; raises `WanTpuError` if one has gone meanwhile, or is another."""
        found = {name: _load_image(location) for name, (location, _) in self.images.items()}
        for name, (location, digest) in self.images.items():
            if found[name].info["sha256"] != digest:
                raise InvalidInput(f"{name} {location} has changed since the manifest was read; run the batch again")
        return self.plan.with_images(**found)


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    planner  the model's `ModelSpec.plan`, which raises `InvalidRequest` where it can't make what a line asks for

    Raises `StorageError` when the manifest itself can't be read, `InvalidInput` when it has no line.
    """
    folder, name = split_location(str(location))
    where = absolute(str(location))
    if not name:
        raise InvalidInput(f"{location} is a folder; give the path of a file with one JSON line a request")
    content = _read_bytes(where)
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise InvalidInput(f"{where} has no requests; write one JSON object a line, such as {_EXAMPLE}")
    with ThreadPoolExecutor(_READERS) as readers:
        read = list(readers.map(lambda line: _read_line(line[0], line[1], absolute(folder), planner), lines))
    bad: list[BadLine] = []
    ids: dict[str, Entry] = {}
    outputs: dict[str, Entry] = {}
    for item in read:  # of several good lines with one id or output the first is kept
        if isinstance(item, BadLine):
            bad.append(item)
        elif (reason := _clash(item, ids, outputs)) is not None:
            bad.append(BadLine(line=item.line, id=item.id, reason=reason))
        else:
            ids[item.id] = outputs[item.output] = item
    return Manifest(entries=tuple(ids.values()), bad=tuple(bad))


_EXAMPLE = '{"prompt": "A cat looks into the camera.", "image": "cat.png", "seed": 1}'


def _read_line(number: int, line: bytes, folder: str, planner: Planner) -> Entry | BadLine:
    given: dict[str, Any] = {}
    try:
        given = _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        fields = {name: value for name, value in given.items() if name in _REQUEST_FIELDS}
        id_ = given["id"] if given.get("id") is not None else _derived_id(fields)
        _check_name("id", id_, "cat-1")
        output = given["output"] if given.get("output") is not None else f"{id_}.mp4"
        _check_name("output", output, "clips/cat.mp4")
        if not output.endswith(".mp4"):
            raise InvalidInput(f"has the output {output!r}; give a name that ends in .mp4, which is what is written")
        places = {name: _resolve(fields.pop(name), folder) for name in IMAGES if fields.get(name) is not None}
        if isinstance(fields.get("video"), str):
            fields["video"] = _resolve(fields["video"], folder)
        if isinstance(fields.get("loras"), list):
            fields["loras"] = [_beside(lora, folder) for lora in fields["loras"]]
        pixels = {name: _load_image(location) for name, location in places.items()}
        request = GenerationRequest(**fields | pixels)
        plan = planner(request).with_images()
    except WanTpuError as error:
        id_ = given.get("id") if isinstance(given.get("id"), str) else None
        return BadLine(line=number, id=id_, reason=shortened(str(error), 500))
    decides = request.to_json()
    images = {name: (places[name], image.info["sha256"]) for name, image in pixels.items()}
    decides |= {name: digest for name, (_, digest) in images.items()}
    return Entry(line=number, id=id_, output=output, plan=plan, images=images, digest=_digest(decides))


def _beside(lora: object, folder: str) -> object:
    """Return an adapter, its path absolute where it lies below the manifest's folder."""
    if isinstance(lora, str | dict):
        found = lora_of(lora)
        if not os.path.isabs(found.path) and (path := posixpath.join(folder, found.path)) and os.path.exists(path):
            return dataclasses.asdict(dataclasses.replace(found, path=path))
    return lora


def _check_name(what: str, name: object, example: str) -> None:
    if not isinstance(name, str):
        raise InvalidInput(f"has the {what} {name!r}; give a string, such as {example!r}")
    if (problem := name_problem(name)) is not None:
        raise InvalidInput(f"has the {what} {name!r}, which {problem}; give one such as {example!r}")


def shortened(text: str, most: int) -> str:
    """Return a message without the middle of the megabyte that it may quote."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode(), object_pairs_hook=_no_repeats, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"is no UTF-8 (byte {error.start}); save the manifest as UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"is no JSON ({error.msg} at column {error.colno}); write an object such as {_EXAMPLE}"
        ) from None
    except RecursionError:
        raise InvalidInput(f"is nested too deep; write an object such as {_EXAMPLE}") from None
    if not isinstance(fields, dict):
        raise InvalidInput(f"is a JSON {type(fields).__name__}; write an object such as {_EXAMPLE}")
    for name in fields:
        if name not in _FIELDS:
            raise InvalidInput(f"has the unknown field {name!r}; {_nearest(name)}")
    return fields


def _integer(digits: str) -> int:
    if len(digits) > 100:  # Python reads longer ones than it prints
        raise InvalidInput(f"has a number of {len(digits)} digits; no field takes one")
    return int(digits)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"has the field {twice!r} twice; keep one")
    return fields


def _nearest(name: str) -> str:
    if name == "size":
        return "give height and width"
    close = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_FIELDS)}"


def _derived_id(fields: dict[str, Any]) -> str:
    """Return words of the prompt, for people, and a digest of the fields as written."""
    prompt = fields.get("prompt")
    words = re.findall(r"[a-z0-9]+", prompt.lower()) if isinstance(prompt, str) else []
    return "-".join([*words[:4], _digest(fields)[:10]] if words else ["request", _digest(fields)[:10]])[-100:]


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _clash(entry: Entry, ids: dict[str, Entry], outputs: dict[str, Entry]) -> str | None:
    """Return why an entry can't be beside earlier ones."""
    if entry.id in ids:
        return f"has the id {entry.id!r} of line {ids[entry.id].line}; give it another id (or another seed)"
    if entry.output in outputs:
        return f"has the output {entry.output!r} of line {outputs[entry.output].line}; give it another"
    within = any(parent.as_posix() in outputs for parent in Path(entry.output).parents)
    if within or any(name.startswith(f"{entry.output}/") for name in outputs):
        return f"has the output {entry.output!r}, which is a file and a folder; give it another"
    return None


# ---- files of a manifest: local or gs://


def _resolve(image: object, folder: str) -> str:
    """Return an image's absolute path or gs:// address; a relative one begins at `folder`."""
    if not isinstance(image, str) or not image:
        raise InvalidInput(f"has the image {image!r}; give a path or gs:// address")
    if "://" in image or image.startswith("/"):
        return image
    if not folder.startswith(GCS_SCHEME):
        return str(Path(folder, image))
    bucket, _, path = folder.removeprefix(GCS_SCHEME).partition("/")
    joined = posixpath.normpath(posixpath.join(path, image))
    if joined.startswith(".."):
        raise InvalidInput(
            f"has the image {image!r}, which is outside of the bucket {bucket!r}; give its gs:// address"
        )
    return f"{GCS_SCHEME}{bucket}/{joined}"


def _read_bytes(location: str) -> bytes:
    folder, name = split_location(location)
    if location.startswith(GCS_SCHEME):
        return open_storage(folder).read(name)
    try:
        return Path(location).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"can't read {location} ({reason}); check the path and its permissions") from None


def _load_image(location: str) -> Image.Image:
    """Return the image with the digest of its file in `info["sha256"]`."""
    if location.startswith(GCS_SCHEME) or os.path.isfile(location):  # unlike Path.is_file, false for a name too long
        content = _read_bytes(location)
        image = decode_image(io.BytesIO(content), location)
        image.info["sha256"] = hashlib.sha256(content).hexdigest()
        return image
    return load_image(location)  # which says what is wrong
