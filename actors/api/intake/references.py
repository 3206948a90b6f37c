"""Read an image in all forms in which clients send one or refer to one."""

import base64
import binascii
from typing import Any
from urllib.parse import unquote_to_bytes

from wan_tpu.errors import InvalidRequest

IMAGE, LAST = "input_reference", "last_frame"
IMAGES = (IMAGE, LAST)
_HEAD = 200  # Maximum characters of a data URL before its content.
# Keys of the objects for images in OpenAI's and OpenRouter's APIs.
_KEYS = {"image_url", "url", "type", "detail", "file_id"}


def read_reference(value: Any, name: str) -> bytes | str:
    """Return the content of a field's file, or its URL; raises `InvalidRequest`.

    Args:
        value: A file's bytes; a URL; {"image_url": URL}; {"type": "image_url", "image_url": {"url": URL}}; or a list of
            one of these.
        name: The field, for error messages.
    """
    if isinstance(value, list):
        if len(value) != 1:
            raise InvalidRequest(f"{name} has {len(value)} images; send one", name)
        value = value[0]
    if isinstance(value, dict) and value.keys() <= _KEYS:
        if "file_id" in value:
            raise InvalidRequest(
                f"{name} names a file by its id, and this service keeps no files; {_describe_forms(name)}", name
            )
        value = value.get("image_url", value.get("url"))
        if isinstance(value, dict) and value.keys() <= _KEYS:
            value = value.get("url")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is no image; {_describe_forms(name)}", name)
    if _is_data(value):
        return decode_data_url(value, name)
    if value.partition("://")[0].lower() not in ("http", "https"):
        raise InvalidRequest(f"{name} is neither a file nor a URL; {_describe_forms(name)}", name)
    return value


def decode_data_url(url: str, name: str = IMAGE) -> bytes:
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


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _describe_forms(name: str) -> str:
    return (
        f'send a file in a form, or in JSON "{name}": {{"image_url": "https://..."}}, or in its place '
        '"data:image/png;base64,..."'
    )
