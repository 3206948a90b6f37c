"""Read what a client sends: JSON, or a form with an image in it. The image comes out decoded and written anew."""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from actors.api.http.error_answers import HttpError
from actors.api.http.objects import CreateVideo
from actors.api.images.decoder import CleanImage, ImageDecoder, data_url_content
from actors.api.outbound.client import FetchSettings, fetch
from wan_tpu.errors import InvalidRequest

IMAGE = "input_reference"
_FIELDS = 40
_FIELD_BYTES = 200_000  # a prompt of 32,000 characters in UTF-8, and room


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
    """Return what was sent; raises `InvalidRequest`, or `HttpError` for a kind of body that isn't known."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    upload = None
    if kind == "application/json":
        fields = from_json(await request.body())
    elif kind == "multipart/form-data":
        fields, upload = await _form(request, images)
    else:
        raise HttpError(
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
        raise InvalidRequest(str(error), IMAGE) from None


def from_json(body: bytes) -> CreateVideo:
    """Return a request from JSON; raises `InvalidRequest`."""
    with _named_fields():
        return CreateVideo.model_validate_json(body, strict=True)


def from_form(fields: Iterable[tuple[str, str]]) -> CreateVideo:
    """Return a request from a form's text fields, its file left out; raises `InvalidRequest`.

    An object's field is written with brackets, as OpenAI's client writes it: input_reference[image_url].
    """
    body: dict[str, Any] = {}
    for name, value in fields:
        outer, bracket, inner = name.partition("[")
        target, key = body, outer
        if bracket and inner.endswith("]"):
            target, key = body.setdefault(outer, {}), inner[:-1]
        if not isinstance(target, dict) or key in target:
            raise InvalidRequest(f"the field {name[:80]!r} was sent more than once; send it once", outer[:80])
        target[key] = value
    with _named_fields():
        return CreateVideo.model_validate(body, strict=False)  # a form has only texts: "81" is a number


async def _form(request: Request, images: ImageDecoder) -> tuple[CreateVideo, bytes | None]:
    try:
        form = await request.form(max_files=1, max_fields=_FIELDS, max_part_size=_FIELD_BYTES)
    except (HTTPException, ValueError, LookupError) as error:
        reason = getattr(error, "detail", None) or str(error) or type(error).__name__
        raise InvalidRequest(f"the form can't be read ({reason[:200]}); send multipart/form-data") from None
    try:
        texts, upload = [], None
        for name, value in form.multi_items():
            if isinstance(value, str):
                texts.append((name, value))
            elif name != IMAGE:
                raise InvalidRequest(f"the field {name[:80]!r} is a file; only {IMAGE} may be one", name[:80])
            else:
                upload = await value.read(images.limits.max_bytes + 1)  # one too many is refused by the decoder
        fields = from_form(texts)
    finally:
        await form.close()
    if upload is not None and fields.input_reference is not None:
        raise InvalidRequest(f"{IMAGE} was sent as a file and as a URL; send one of them", IMAGE)
    return fields, upload


@contextlib.contextmanager
def _named_fields() -> Iterator[None]:
    """Have what is wrong with a field raised as `InvalidRequest`, without what was given: it may be a prompt."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:80]
        if first["type"] == "extra_forbidden":
            known = ", ".join(CreateVideo.model_fields)
            raise InvalidRequest(f"there is no field {param!r}; there are: {known}", param) from None
        raise InvalidRequest(f"{param or 'the body'}: {first['msg']}", param) from None
