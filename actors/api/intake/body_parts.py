"""Split bodies into their fields, as JSON with this service's own names, and the images among them."""

import dataclasses
import json
from typing import Any

from actors.api.intake.dialects import translate
from actors.api.intake.forms import MAX_FIELDS, nest, read_form
from actors.api.intake.json_text import loads
from actors.api.intake.references import IMAGE, IMAGES, read_reference
from wan_tpu.errors import InvalidRequest

JSON, FORM, PICTURE = "application/json", "multipart/form-data", "image"
_MAX_TEXT = 500_000  # Characters of all fields as JSON.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a body.

    Attributes:
        text: The fields except images, as JSON.
        uploads: The images' files, by the name of the field.
    """

    text: str = "{}"
    uploads: dict[str, bytes] = dataclasses.field(default_factory=dict)


def parse_media_type(content_type: str) -> str:
    """Return the media type of a Content-Type header, without parameters."""
    return content_type.partition(";")[0].strip().lower()


def split_body(content_type: str, body: bytes) -> Parts:
    """Split a body, or wrap an image's file as the only part; raises `InvalidRequest`."""
    kind = parse_media_type(content_type)
    if kind == PICTURE:
        return Parts(uploads={IMAGE: body})
    try:
        return _split_fields(loads(body) if kind == JSON else nest(read_form(content_type, body, IMAGES)))
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; send the fields as /docs describes them") from None


def _split_fields(body: Any) -> Parts:
    uploads: dict[str, bytes] = {}
    if isinstance(body, dict):
        for inner in (body, *body.values()):
            if isinstance(inner, dict) and len(inner) > MAX_FIELDS:
                raise InvalidRequest(f"the body has {len(inner)} fields; {MAX_FIELDS} are taken")
        body = translate(body)
        for name in IMAGES:
            if name not in body:
                continue
            reference = read_reference(body.pop(name), name)
            if isinstance(reference, bytes):
                uploads[name] = reference
            else:
                body[name] = {"image_url": reference}
    text = json.dumps(body, ensure_ascii=False)
    if len(text) > _MAX_TEXT:
        raise InvalidRequest(f"the fields have {len(text)} characters; {_MAX_TEXT} are taken, an image not counted")
    return Parts(text=text, uploads=uploads)
