"""Read an image or a video in all forms in which clients send one or refer to one."""

import base64
import binascii
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from actors.jobs.values import is_id
from wan_tpu.errors import InvalidRequest

IMAGE, LAST, VIDEO = "input_reference", "last_frame", "video"
IMAGE_FIELDS = (IMAGE, LAST)
FILES = (*IMAGE_FIELDS, VIDEO)  # Fields that are a file.
REFERENCES = "input_references"  # A field that is a list of files.
# vLLM-Omni's lists of references, in the order in which its server reads them.
REFERENCE_LISTS = ("image_reference", "video_reference", "audio_reference")
MOST_REFERENCES = 20  # Of a body. Models take fewer.
# What a reference is, by its type in OpenRouter's and vLLM-Omni's APIs, and the key of its URL.
_VIDEO_URL = "video_url"
_KINDS = {"image_url": "image", _VIDEO_URL: "video", "audio_url": "audio"}
_WITH_SOUND = "with_sound"  # The key that says whether a video's sound is a reference as well.
_HEAD = 200  # Maximum characters of a data URL before its content.
# Keys of the objects for images in OpenAI's and OpenRouter's APIs.
_KEYS = {"image_url", "url", "type", "detail", "file_id"}


def read_reference(value: Any, name: str) -> bytes | str:
    """Return the content of a field's file, or its URL; raises `InvalidRequest`.

    Args:
        value: A file's bytes; a URL; {"image_url": URL}; {"type": "image_url", "image_url": {"url": URL}}; or a list of
            one of these.
    """
    if isinstance(value, list):
        if len(value) != 1:
            raise InvalidRequest(f"{name} has {len(value)} images; send one", name)
        value = value[0]
    if isinstance(value, dict) and value.keys() <= _KEYS:
        if "file_id" in value:
            raise InvalidRequest(
                f"{name} names a file by its id, but this service doesn't store files; {_describe_forms(name)}", name
            )
        value = value.get("image_url", value.get("url"))
        if isinstance(value, dict) and value.keys() <= _KEYS:
            value = value.get("url")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} isn't an image; {_describe_forms(name)}", name)
    if _is_data(value):
        return decode_data_url(value, name)
    if value.partition("://")[0].lower() not in ("http", "https"):
        raise InvalidRequest(f"{name} is neither a file nor a URL; {_describe_forms(name)}", name)
    return value


def read_video_reference(value: Any) -> bytes | dict[str, str]:
    """Return the content of a field's video, or {"id": ...} or {"video_url": ...}; raises `InvalidRequest`.

    Args:
        value: A file's bytes; a URL; the id of a video; {"id": ID}; {"video_url": URL}; or {"type": "video_url",
            "video_url": {"url": URL}}.
    """
    if isinstance(value, dict) and value.keys() == {"id"}:
        value = value["id"] if isinstance(value["id"], str) else None
        if value is not None:
            return {"id": value}
    if isinstance(value, dict) and value.keys() <= {"video_url", "url", "type"}:
        value = value.get("video_url", value.get("url"))
        if isinstance(value, dict) and value.keys() == {"url"}:
            value = value["url"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{VIDEO} isn't a video; {_VIDEO_FORMS}", VIDEO)
    if _is_data(value):
        return decode_data_url(value, VIDEO)
    if is_id(value):
        return {"id": value}
    if value.partition("://")[0].lower() not in ("http", "https"):
        raise InvalidRequest(f"{VIDEO} is not a file, a URL or the id of a video; {_VIDEO_FORMS}", VIDEO)
    return {"video_url": value}


def name_reference(index: int) -> str:
    """Return the name of the file of one of the references."""
    return f"{REFERENCES}.{index}"


class SentReference(NamedTuple):
    """A reference as a body has it.

    Attributes:
        kind: What it is; None for a file, which says that itself.
        file: Its content or its URL.
        with_sound: Whether a video's sound belongs to it.
    """

    kind: str | None
    file: bytes | str
    with_sound: bool = True


def read_references(values: Any) -> list[SentReference]:
    """Return the references of a body.

    Args:
        values: A list, or a single one, of: a file's bytes; {"type": "image_url", "image_url": {"url": URL}}, likewise
            with video_url and audio_url; the same without type, or with a URL in place of the inner object. A video
            may have "with_sound": false.

    Raises:
        InvalidRequest: One of them has another form.
    """
    values = values if isinstance(values, list) else [values]
    if len(values) > MOST_REFERENCES:
        raise InvalidRequest(
            f"{REFERENCES} has {len(values)} files; at most {MOST_REFERENCES} are accepted", REFERENCES
        )
    return [_read_part(value, index) for index, value in enumerate(values)]


def _read_part(value: Any, index: int) -> SentReference:
    if isinstance(value, bytes):
        return SentReference(None, value)
    name = name_reference(index)
    keys = value.keys() & _KINDS.keys() if isinstance(value, dict) else set()
    own = {*keys, "type", *({_WITH_SOUND} if keys == {_VIDEO_URL} else ())}
    if len(keys) != 1 or not value.keys() <= own or value.get("type") not in (None, *keys):
        raise InvalidRequest(f"{name} isn't a reference; {_REFERENCE_FORMS}", REFERENCES)
    [key] = keys
    url, with_sound = value[key], value.get(_WITH_SOUND, True)
    if isinstance(url, dict) and url.keys() <= {"url", "detail", "format"}:
        url = url.get("url")
    if not isinstance(url, str):
        raise InvalidRequest(f"{name} has no URL; {_REFERENCE_FORMS}", REFERENCES)
    if not isinstance(with_sound, bool):
        raise InvalidRequest(f"{name}: {_WITH_SOUND} is {with_sound!r}; give true or false", REFERENCES)
    if _is_data(url):
        return SentReference(_KINDS[key], _decode_data(url, _KINDS[key], REFERENCES), with_sound)
    if url.partition("://")[0].lower() not in ("http", "https"):
        raise InvalidRequest(f"{name} is neither a file nor a URL; {_REFERENCE_FORMS}", REFERENCES)
    return SentReference(_KINDS[key], url, with_sound)


def decode_data_url(url: str, name: str = IMAGE) -> bytes:
    """Return the content of a data: URL (RFC 2397); raises `InvalidRequest`."""
    return _decode_data(url, "video" if name == VIDEO else "image", name)


def _decode_data(url: str, subject: str, name: str) -> bytes:
    example = {"video": "video/mp4", "audio": "audio/wav"}.get(subject, "image/png")
    head, comma, encoded = url.partition(",")
    if not comma or len(head) > _HEAD or not _is_data(head):
        raise InvalidRequest(f"the {subject} isn't a data URL; give one such as data:{example};base64,iVBORw0...", name)
    kind, *options = head[5:].lower().split(";")
    if kind.strip() and not kind.strip().startswith(f"{subject}/"):
        raise InvalidRequest(f"the data URL is of type {kind[:40]!r}; give one such as {example}", name)
    try:
        content = unquote_to_bytes(encoded) if "%" in encoded else encoded.encode("ascii")
        return base64.b64decode(content, validate=True) if options and options[-1] == "base64" else content
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequest("the data URL isn't valid base64; encode the file again", name) from None


_VIDEO_FORMS = (
    'send a file in a form, or in JSON {"id": "video_..."} for a video of this service, {"video_url": "https://..."}, '
    'or "data:video/mp4;base64,..."'
)


_REFERENCE_FORMS = (
    'send files in a form, or in JSON a list of {"type": "image_url", "image_url": {"url": "https://..."}}, or of '
    "video_url or audio_url in its place"
)


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _describe_forms(name: str) -> str:
    return (
        f'send a file in a form, or in JSON "{name}": {{"image_url": "https://..."}}, or in its place '
        '"data:image/png;base64,..."'
    )
