"""What a client asks for: the fields of its body, and the images that come with it or that they name."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import IO, Any

from pydantic import ValidationError

from actors.api.http.error_answers import HttpError
from actors.api.intake.apart import FORM, IMAGE, IMAGES, JSON, PICTURE, Parts, apart, loads, media_type
from actors.api.intake.create_video import CreateVideo
from actors.api.intake.reader import Reader, Reading
from actors.api.intake.receiving import as_file
from actors.api.outbound.client import FetchSettings, fetch
from wan_tpu.errors import InvalidRequest

_LISTS = ("loras", "sigmas")  # fields that a form has as JSON


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A body: its fields, a digest by which the same is known again, and the process that holds its images, if any."""

    fields: CreateVideo
    digest: str
    reading: Reading | None

    def has(self, name: str) -> bool:
        """Whether there is an image in a field."""
        return getattr(self.fields, name) is not None or (self.reading is not None and name in self.reading.uploads)


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
            if parts.uploads:
                reading = await stack.enter_async_context(reader.read(content_type, body, key))
        uploads = {} if reading is None else reading.uploads
        named = [name for name in IMAGES if getattr(fields, name) is not None]
        if uploads and named:  # one that waits for a process while it holds another would keep others from theirs
            raise InvalidRequest(
                f"{named[0]} was sent as a URL, and {next(iter(uploads))} as a file; send files alone, or URLs",
                named[0],
            )
        digest = hashlib.sha256(f"{fields.model_dump_json()}\0{json.dumps(uploads)}".encode()).hexdigest()
        yield Asked(fields=fields, digest=digest, reading=reading if uploads else None)


@contextlib.asynccontextmanager
async def image_of(
    asked: Asked, name: str, reader: Reader, fetching: FetchSettings, key: str
) -> AsyncIterator[tuple[Reading, str] | None]:
    """Give who holds the image of a field, fetched if it is elsewhere, and its name there; raises `InvalidRequest`."""
    if asked.reading is not None and name in asked.reading.uploads:
        yield asked.reading, name
        return
    reference = getattr(asked.fields, name)
    if reference is None:
        yield None
        return
    with as_file() as content:
        try:
            async with reader.fetches.turn(key):
                await fetch(reference.image_url, fetching, content)
            async with reader.read(PICTURE, content, key) as reading:
                yield reading, IMAGE
        except InvalidRequest as error:
            raise InvalidRequest(
                str(error), name if error.field == IMAGE or error.field is None else error.field
            ) from None


def _fields(parts: Parts) -> CreateVideo:
    return from_json(parts.text) if parts.text is not None else from_form(parts.fields or [])


def from_json(text: str | bytes) -> CreateVideo:
    """Return a request from JSON; raises `InvalidRequest`."""
    with _named_fields():  # by Python's own reader, which lets a lone surrogate through: so its field can be named
        return CreateVideo.model_validate(loads(text), strict=True)


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
        return loads(value)
    except InvalidRequest:
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
