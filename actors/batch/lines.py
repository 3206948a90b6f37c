"""Parse one line of a manifest from JSON into fields. Errors say what to write instead."""

import hashlib
import itertools
import json
import re
from typing import Any, NamedTuple

from wan_tpu.errors import InvalidInput
from wan_tpu.request import FIELDS as REQUEST_FIELDS
from wan_tpu.segments import WAYS
from wan_tpu.storage.base import MAX_PART_BYTES, name_problem
from wan_tpu.suggest import nearest

SEGMENTS = ("next_prompts", "continue_by")  # Fields about what follows the video of the other ones.
FIELDS = ("id", "output", *SEGMENTS, *REQUEST_FIELDS)
EXAMPLE = '{"prompt": "A cat looks into the camera.", "image": "cat.png", "seed": 1}'
RESULTS = "results.jsonl"
MAX_ID_BYTES = 200  # An id is part of the names of logs, spans and snapshots.
MAX_OUTPUT_BYTES = 800  # Objects of Google Cloud Storage have names of up to 1,024 bytes, the prefix included.
_KNOWN = frozenset(FIELDS)
_ENCODER = json.JSONEncoder(sort_keys=True)
_WORD = re.compile(r"[a-z0-9]+")


class ParsedLine(NamedTuple):
    """A line as written, before its files are read and its request is checked."""

    number: int
    id: str
    output: str
    names_itself: bool  # Whether the line has an id of its own; False if the id is derived.
    fields: dict[str, Any]
    segments: dict[str, Any]  # Those of `SEGMENTS` that the line has.


def name_line(number: int, values: dict[str, Any]) -> ParsedLine:
    """Return a line with its id and output, derived if it has none; raises `InvalidInput` for unusable ones."""
    fields = {name: value for name, value in values.items() if name in REQUEST_FIELDS}
    segments = {name: value for name in SEGMENTS if (value := values.get(name)) is not None}
    _check_segments(segments)
    id_, output = values.get("id"), values.get("output")
    has_id = id_ is not None
    if id_ is None:
        id_ = derive_id(fields | segments)
    else:
        _check_name("id", id_, "cat-1", MAX_ID_BYTES)
    if output is None:
        output = derive_output(id_)
    else:
        _check_name("output", output, "clips/cat.mp4", MAX_OUTPUT_BYTES)
        if not output.endswith(".mp4"):
            raise InvalidInput(
                f"has the output {output!r}; give a name that ends in .mp4, the only format that is written"
            )
        if (problem := name_problem(record_name(output))) is not None:
            raise InvalidInput(f"has the output {output!r}, whose record {problem}; give a shorter name")
    if "prompt" not in fields:
        raise InvalidInput('has no prompt; give one, or "" for an empty prompt')
    return ParsedLine(number, id_, output, has_id, fields, segments)


def record_name(output: str) -> str:
    return output.removesuffix(".mp4") + ".json"


def preview_name(output: str) -> str:
    """Return the name of the picture of an unfinished video."""
    return output.removesuffix(".mp4") + ".preview.jpg"


def parse_object(line: bytes) -> dict[str, Any]:
    """Return a line's JSON object, without unknown or repeated fields; raises `InvalidInput`."""
    try:
        fields = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise InvalidInput(f"isn't UTF-8 (byte {error.start}); save the manifest as UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"isn't valid JSON ({error.msg} at column {error.colno}); write an object such as {EXAMPLE}"
        ) from None
    except RecursionError:
        raise InvalidInput(f"is nested too deeply; write an object such as {EXAMPLE}") from None
    if not isinstance(fields, dict):
        raise InvalidInput(f"is a JSON {type(fields).__name__}; write an object such as {EXAMPLE}")
    for name in fields:
        if name not in _KNOWN:
            raise InvalidInput(f"has the unknown field {name!r}; {_suggest(name)}")
    return fields


def derive_id(fields: dict[str, Any]) -> str:
    """Return an id that consists of words of the prompt, for people, and a digest of the fields as written."""
    prompt = fields.get("prompt")
    words = (
        [match[0] for match in itertools.islice(_WORD.finditer(prompt.lower()), 4)] if isinstance(prompt, str) else []
    )
    return "-".join([*(words or ["request"]), compute_digest(fields)[:10]])[-100:]


def derive_output(id: str) -> str:
    """Return the name of the video of an id: "<id>.mp4", shortened if file names can't be that long."""
    if len(id) * 4 + len(".json") <= MAX_PART_BYTES:
        return f"{id}.mp4"
    folder, slash, name = id.rpartition("/")
    encoded = name.encode()
    if len(encoded) + len(".json") > MAX_PART_BYTES:
        digest = hashlib.sha256(encoded).hexdigest()[:10]
        name = f"{encoded[: MAX_PART_BYTES - 20].decode(errors='ignore')}-{digest}"
    return f"{folder}{slash}{name}.mp4"


def compute_digest(value: dict[str, Any]) -> str:
    """Return the SHA-256 of plain values, independent of the order of keys."""
    return hashlib.sha256(_ENCODER.encode(value).encode()).hexdigest()


def shorten(text: str, most: int) -> str:
    """Return a message without its middle if it is longer than `most`: it may quote a megabyte."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _check_segments(segments: dict[str, Any]) -> None:
    """Refuse prompts of segments that aren't a list of texts; raises `InvalidInput`."""
    prompts, way = segments.get("next_prompts", []), segments.get("continue_by")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise InvalidInput('has next_prompts of another form; give a list of texts, such as ["it falls"]')
    if way not in (None, *WAYS) or (way is not None and not prompts):
        raise InvalidInput(f"has continue_by {way!r}; give {' or '.join(WAYS)}, beside next_prompts")


def _check_name(field: str, name: object, example: str, max_bytes: int) -> None:
    if not isinstance(name, str):
        raise InvalidInput(f"has the {field} {name!r}; give a string, such as {example!r}")
    if (problem := name_problem(name)) is not None:
        raise InvalidInput(f"has the {field} {name!r}, which {problem}; give one such as {example!r}")
    if (size := len(name.encode())) > max_bytes:
        raise InvalidInput(f"has the {field} {shorten(name, 60)!r} of {size} bytes; allowed: at most {max_bytes}")


def _read_integer(digits: str) -> int:
    if len(digits) > 100:  # Python can read longer numbers than it can print.
        raise InvalidInput(f"has a number of {len(digits)} digits; no field allows so many")
    return int(digits)


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"has the field {twice!r} twice; keep one")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_read_pairs, parse_int=_read_integer)


def _suggest(name: str) -> str:
    if name == "size":
        return "give height and width"
    close = nearest(name, FIELDS)
    return f"did you mean {close!r}?" if close else f"the fields are {', '.join(FIELDS)}"
