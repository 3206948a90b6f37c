"""Bodies taken apart: the fields of JSON or a form, as JSON in this service's own terms, and the images among them."""

import dataclasses
import json
from typing import Any

from actors.api.intake.dialects import translate
from actors.api.intake.forms import MAX_FIELDS, nest, read_form
from actors.api.intake.json_text import loads
from actors.api.intake.references import IMAGE, IMAGES, read_reference
from wan_tpu.errors import InvalidRequest

JSON, FORM, PICTURE = "application/json", "multipart/form-data", "image"
_TEXT_BYTES = 500_000  # Of all fields as JSON.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What is in a body: `text`, its fields as JSON without images, and the images' files by the field's name."""

    text: str = "{}"
    uploads: dict[str, bytes] = dataclasses.field(default_factory=dict)


def media_type(content_type: str) -> str:
    """Return the type of a Content-Type header, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def apart(content_type: str, body: bytes) -> Parts:
    """Return the parts of a body, or an image's file as its own; raises `InvalidRequest`."""
    kind = media_type(content_type)
    if kind == PICTURE:
        return Parts(uploads={IMAGE: body})
    try:
        return _parts(loads(body) if kind == JSON else nest(read_form(content_type, body, IMAGES)))
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; send the fields as /docs describes them") from None


def _parts(body: Any) -> Parts:
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
    if len(text) > _TEXT_BYTES:
        raise InvalidRequest(f"the fields have {len(text)} characters; {_TEXT_BYTES} are taken, an image not counted")
    return Parts(text=text, uploads=uploads)
