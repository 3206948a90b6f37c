"""Split bodies into their fields, as JSON with this service's own names, and the files among them."""

import dataclasses
import json
from typing import Any

from actors.api.untrusted.dialects import translate
from actors.api.untrusted.forms import MAX_FIELDS, nest, read_form, read_urlencoded
from actors.api.untrusted.json_text import loads
from actors.api.untrusted.references import (
    FILES,
    IMAGE,
    REFERENCE_LISTS,
    REFERENCES,
    VIDEO,
    name_reference,
    read_reference,
    read_references,
    read_video_reference,
)
from wan_tpu.errors import InvalidRequest

JSON, FORM, URLENCODED = "application/json", "multipart/form-data", "application/x-www-form-urlencoded"
PICTURE, CLIP, MEDIUM = "image", "video", "reference"
# The field of a file that comes without a body, by its content type.
WRAPPED = {PICTURE: IMAGE, CLIP: VIDEO, MEDIUM: name_reference(0)}
_MAX_TEXT = 500_000  # Characters of all fields as JSON.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a body."""

    text: str = "{}"  # The fields except files, as JSON.
    uploads: dict[str, bytes] = dataclasses.field(default_factory=dict)  # The files, by the name of the field.


def parse_media_type(content_type: str) -> str:
    """Return the media type of a Content-Type header, without parameters."""
    return content_type.partition(";")[0].strip().lower()


def split_body(content_type: str, body: bytes) -> Parts:
    """Split a body, or wrap a file as the only part; raises `InvalidRequest`."""
    kind = parse_media_type(content_type)
    if kind in WRAPPED:
        return Parts(uploads={WRAPPED[kind]: body})
    try:
        if kind == JSON:
            return _split_fields(loads(body))
        names = *FILES, REFERENCES, *REFERENCE_LISTS
        fields = read_urlencoded(body, names) if kind == URLENCODED else read_form(content_type, body, names)
        return _split_fields(nest(fields))
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; send the fields as /docs describes them") from None


def _split_fields(body: Any) -> Parts:
    uploads: dict[str, bytes] = {}
    if isinstance(body, dict):
        for inner in (body, *body.values()):
            if isinstance(inner, dict) and len(inner) > MAX_FIELDS:
                raise InvalidRequest(f"the body has {len(inner)} fields; at most {MAX_FIELDS} are accepted")
        body = translate(body)
        for name in FILES:
            if name not in body:
                continue
            value = body.pop(name)
            reference = read_video_reference(value) if name == VIDEO else read_reference(value, name)
            if isinstance(reference, bytes):
                uploads[name] = reference
            else:
                body[name] = {"image_url": reference} if isinstance(reference, str) else reference
        if REFERENCES in body:
            references = read_references(body[REFERENCES])
            body[REFERENCES] = []
            for index, (kind, file, with_sound) in enumerate(references):
                url = None if isinstance(file, bytes) else file
                body[REFERENCES].append({"kind": kind, "url": url, "with_sound": with_sound})
                if isinstance(file, bytes):
                    uploads[name_reference(index)] = file
    text = json.dumps(body, ensure_ascii=False)
    if len(text) > _MAX_TEXT:
        raise InvalidRequest(
            f"the fields have {len(text)} characters; at most {_MAX_TEXT} are accepted, not counting files"
        )
    return Parts(text=text, uploads=uploads)
