"""Read what a client sends: JSON, or a form with an image in it. The image comes out decoded and written anew."""

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator

from fastapi import Request, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

from actors.api.failures import Problem
from actors.api.fetch import FetchSettings, fetch
from actors.api.forms import InvalidField, from_form, from_json
from actors.api.images import CleanImage, ImageDecoder, data_url_content, read_limited
from actors.api.objects import CreateVideo
from wan_tpu.errors import InvalidRequest

IMAGE = "input_reference"
_FIELDS = 40
_FIELD_BYTES = 200_000  # a prompt of 32,000 characters in UTF-8, and room
_CHUNK = 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A body: its fields, the image if it came as a file, and a digest by which the same is known again."""

    fields: CreateVideo
    upload: bytes | None
    digest: str

    @property
    def has_image(self) -> bool:
        """Whether there is an image to start from."""
        return self.upload is not None or self.fields.input_reference is not None


async def read_body(request: Request, images: ImageDecoder) -> Asked:
    """Return what was sent; raises `InvalidRequest`, or `Problem` for a kind of body that isn't known."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    upload = None
    if kind == "application/json":
        fields = from_json(await _json(request))
    elif kind == "multipart/form-data":
        fields, upload = await _form(request, images)
    else:
        raise Problem(
            415, f"the body is {kind[:60] or 'of no type'}; send application/json or multipart/form-data", code="type"
        )
    digest = hashlib.sha256(fields.model_dump_json().encode())
    if upload is not None:
        digest.update(b"\0" + hashlib.sha256(upload).digest())
    return Asked(fields=fields, upload=upload, digest=digest.hexdigest())


async def read_image(asked: Asked, images: ImageDecoder, fetching: FetchSettings) -> CleanImage | None:
    """Return the image of a request, fetched if it is elsewhere; raises `InvalidRequest`."""
    try:
        if asked.upload is not None:
            return await images.decode(asked.upload)
        if asked.fields.input_reference is None:
            return None
        url = asked.fields.input_reference.image_url
        if url[:5].lower() == "data:":
            content = await asyncio.to_thread(data_url_content, url, images.limits)
        else:
            content = await fetch(url, fetching)
        return await images.decode(content)
    except InvalidRequest as error:
        raise InvalidField(str(error), IMAGE) from None


async def _json(request: Request) -> object:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = getattr(error, "msg", None) or type(error).__name__
        raise InvalidField(f"the body is no JSON ({reason}); send a JSON object", None) from None


async def _form(request: Request, images: ImageDecoder) -> tuple[CreateVideo, bytes | None]:
    parser = MultiPartParser(
        request.headers, request.stream(), max_files=1, max_fields=_FIELDS, max_part_size=_FIELD_BYTES
    )
    try:
        form = await parser.parse()
    except (MultiPartException, HTTPException, ValueError, KeyError, LookupError) as error:
        reason = getattr(error, "message", None) or str(error) or type(error).__name__
        raise InvalidField(f"the form can't be read ({reason[:200]}); send multipart/form-data", None) from None
    try:
        texts, upload = [], None
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile) and isinstance(value, str):
                texts.append((name, value))
            elif name != IMAGE:
                raise InvalidField(f"the field {name[:80]!r} is a file; only {IMAGE} may be one", name[:80])
            else:
                upload = await read_limited(_chunks(value), images.limits)
        fields = from_form(texts)
    finally:
        await form.close()
    if upload is not None and fields.input_reference is not None:
        raise InvalidField(f"{IMAGE} was sent as a file and as a URL; send one of them", IMAGE)
    return fields, upload


async def _chunks(upload: object) -> AsyncIterator[bytes]:
    while chunk := await upload.read(_CHUNK):  # type: ignore[attr-defined]
        yield chunk
