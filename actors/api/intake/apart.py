"""Bodies taken apart: the fields of a form or of JSON, and the images that lie among them."""

import base64
import binascii
import dataclasses
import json
from typing import Any
from urllib.parse import unquote_to_bytes

from wan_tpu.errors import InvalidRequest

IMAGE, LAST = "input_reference", "last_frame"
IMAGES = (IMAGE, LAST)  # fields that are images
JSON, FORM, PICTURE = "application/json", "multipart/form-data", "image"
_URL = "image_url"
_FIELDS = 40
_FIELD_BYTES = 200_000  # a prompt of 32,000 characters in UTF-8, and room
_TEXT_BYTES = 500_000  # of all fields in JSON
_HEAD = 200  # characters of a data URL before its content


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What is in a body: `text`, JSON without images, or the `fields` of a form; and files, by the field's name."""

    text: str | None = None
    fields: list[tuple[str, str]] | None = None
    uploads: dict[str, bytes] = dataclasses.field(default_factory=dict)


def media_type(content_type: str) -> str:
    """Return the type of a Content-Type header, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def apart(content_type: str, body: bytes) -> Parts:
    """Return the parts of a body, or an image's file as its own; raises `InvalidRequest`."""
    kind = media_type(content_type)
    if kind == PICTURE:
        return Parts(uploads={IMAGE: body})
    return _json(body) if kind == JSON else _form(content_type, body)


def _json(body: bytes) -> Parts:
    found = loads(body)
    uploads: dict[str, bytes] = {}
    if isinstance(found, dict):
        for one in (found, *(found.get(name) for name in IMAGES)):
            if isinstance(one, dict) and len(one) > _FIELDS:
                raise InvalidRequest(f"the body has {len(one)} fields; {_FIELDS} are taken")
        for name in IMAGES:
            reference = found.get(name)
            url = reference.get(_URL) if isinstance(reference, dict) and len(reference) == 1 else None
            if isinstance(url, str) and _is_data(url):
                uploads[name] = data_url_content(url, name)
                del found[name]
    text = json.dumps(found, ensure_ascii=False)
    if len(text) > _TEXT_BYTES:
        raise InvalidRequest(f"the fields have {len(text)} characters; {_TEXT_BYTES} are taken, an image not counted")
    return Parts(text=text, uploads=uploads)


def loads(text: str | bytes) -> Any:
    """Return what JSON (RFC 8259) says; raises `InvalidRequest`."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise InvalidRequest(f"the body: invalid JSON ({reason[:80]})") from None


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _no_number(name: str) -> None:
    raise ValueError(name)


def data_url_content(url: str, name: str = IMAGE) -> bytes:
    """Return the content of a data: URL (RFC 2397); raises `InvalidRequest`."""
    head, comma, encoded = url.partition(",")
    if not comma or len(head) > _HEAD or not _is_data(head):
        raise InvalidRequest("the image is no data URL; give one such as data:image/png;base64,iVBORw0...", name)
    kind, *options = head[5:].lower().split(";")
    if kind.strip() and not kind.strip().startswith("image/"):
        raise InvalidRequest(f"the data URL is of type {kind[:40]!r}; give an image, such as image/png", name)
    try:
        content = unquote_to_bytes(encoded) if "%" in encoded else encoded.encode("ascii")
        return base64.b64decode(content, validate=True) if options and options[-1] == "base64" else content
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequest("the data URL is no valid base64; encode the file again", name) from None


def _form(content_type: str, body: bytes) -> Parts:
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import Field, File, FormParser, parse_options_header

    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    fields: list[tuple[str, str]] = []
    uploads: dict[str, bytes] = {}
    ended = []

    def on_field(field: Field) -> None:
        if len(fields) == _FIELDS:
            raise InvalidRequest(f"the form has more than {_FIELDS} fields, which is all that are taken")
        name, value = _text(field.field_name or b""), field.value or b""
        image = name.removesuffix(f"[{_URL}]")
        if image != name and image in IMAGES and _is_data(value[:5].decode("latin-1")):
            add_upload(image, data_url_content(_text(value), image))
            return
        if len(value) > _FIELD_BYTES:
            raise InvalidRequest(f"the field {name!r} has {len(value)} bytes; {_FIELD_BYTES} are taken", name)
        fields.append((name, _text(value)))

    def on_file(file: File) -> None:
        name = _text(file.field_name or b"")
        if name not in IMAGES:
            raise InvalidRequest(f"the field {name!r} is a file; only {' and '.join(IMAGES)} may be files", name)
        file.file_object.seek(0)
        add_upload(name, file.file_object.read())

    def add_upload(name: str, content: bytes) -> None:
        if name in uploads:
            raise InvalidRequest(f"{name} was sent more than once; send it once", name)
        uploads[name] = content

    try:
        parser = FormParser(
            FORM,
            on_field,
            on_file,
            on_end=lambda: ended.append(True),
            boundary=options.get(b"boundary"),
            config={"MAX_MEMORY_FILE_SIZE": len(body)},  # never on disk
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise _unreadable(str(error)[:120]) from None
    if not ended:
        raise _unreadable("it is cut off before its end")
    return Parts(fields=fields, uploads=uploads)


def _text(value: bytes) -> str:
    """Return a name or a value; names are for messages, too."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _unreadable("its texts are no UTF-8") from None


def _unreadable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the form can't be read ({reason}); send multipart/form-data")
