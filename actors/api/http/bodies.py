"""What a client asks for: the fields of its body, and the image that comes with it or that they name."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import IO, Any

from pydantic import ValidationError

from actors.api.http.error_answers import HttpError
from actors.api.http.objects import CreateVideo
from actors.api.intake.apart import FORM, IMAGE, JSON, PICTURE, Parts, apart, media_type
from actors.api.intake.reader import Reader, Reading
from actors.api.intake.receiving import as_file
from actors.api.outbound.client import FetchSettings, fetch
from wan_tpu.errors import InvalidRequest

_LISTS = ("loras", "sigmas")  # fields that a form has as JSON


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A body: its fields, a digest by which the same is known again, and the process that holds its image, if any."""

    fields: CreateVideo
    digest: str
    reading: Reading | None

    @property
    def has_image(self) -> bool:
        """Whether there is an image to start from."""
        return self.reading is not None or self.fields.input_reference is not None


@contextlib.asynccontextmanager
async def asked_for(content_type: str, body: IO[bytes], reader: Reader, key: str) -> AsyncIterator[Asked]:
    """Give what a body asks for; raises `InvalidRequest`, or `HttpError` for a kind of body that isn't known."""
    kind = media_type(content_type)
    if kind not in (JSON, FORM):
        known = f"{JSON} or {FORM}"
        raise HttpError(415, f"the body is {kind[:60] or 'of no type'}; send {known}", code="type")
    async with contextlib.AsyncExitStack() as stack:
        reading = None
        small = body.read(reader.limits.small_bytes + 1)
        if len(small) > reader.limits.small_bytes:
            reading = await stack.enter_async_context(reader.read(content_type, body, key))
            fields = _fields(reading.parts)
        else:
            parts = apart(content_type, small)
            fields = _fields(parts)
            if parts.upload is not None:
                image = stack.enter_context(as_file(parts.upload))
                reading = await stack.enter_async_context(reader.read(PICTURE, image, key))
        upload = None if reading is None else reading.upload
        if upload is not None and fields.input_reference is not None:
            raise InvalidRequest(f"{IMAGE} was sent as a file and as a URL; send one of them", IMAGE)
        digest = hashlib.sha256(f"{fields.model_dump_json()}\0{upload or ''}".encode()).hexdigest()
        yield Asked(fields=fields, digest=digest, reading=reading if upload is not None else None)


@contextlib.asynccontextmanager
async def image_of(asked: Asked, reader: Reader, fetching: FetchSettings, key: str) -> AsyncIterator[Reading | None]:
    """Give the image of a request, fetched if it is elsewhere; raises `InvalidRequest`."""
    if asked.reading is not None or asked.fields.input_reference is None:
        yield asked.reading
        return
    with as_file() as content:
        try:
            async with reader.fetches.turn(key):
                await fetch(asked.fields.input_reference.image_url, fetching, content)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), IMAGE) from None
        async with reader.read(PICTURE, content, key) as reading:
            yield reading


def _fields(parts: Parts) -> CreateVideo:
    return from_json(parts.text) if parts.text is not None else from_form(parts.fields or [])


def from_json(text: str | bytes) -> CreateVideo:
    """Return a request from JSON; raises `InvalidRequest`."""
    with _named_fields():
        return CreateVideo.model_validate_json(text, strict=True)


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
        target[key] = _listed(name, value) if name in _LISTS else value
    with _named_fields():
        return CreateVideo.model_validate(body, strict=False)  # a form has only texts: "81" is a number


def _listed(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} is no JSON; in a form, give a list as JSON writes it", name) from None


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
