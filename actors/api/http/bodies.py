"""What a client asks for: the fields of its body, and the images that come with it or that they name."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Iterator

from pydantic import ValidationError
from starlette.requests import Request

from actors.api.http.error_answers import HttpError
from actors.api.intake.apart import FORM, JSON, PICTURE, Parts, apart, media_type
from actors.api.intake.create_video import Adapter, CreateVideo
from actors.api.intake.fair_semaphore import Work
from actors.api.intake.json_text import loads
from actors.api.intake.reader import Reader, Reading
from actors.api.intake.receiving import Arriving
from actors.api.intake.references import IMAGE, IMAGES
from actors.api.outbound.client import FetchSettings, fetch
from wan_tpu.errors import InvalidRequest
from wan_tpu.suggest import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedBody:
    """A body: its fields, a digest by which the same is known again, and the process that holds its images, if any."""

    fields: CreateVideo
    digest: str
    reading: Reading | None

    def has(self, name: str) -> bool:
        """Whether there is an image in a field."""
        return getattr(self.fields, name) is not None or (self.reading is not None and name in self.reading.uploads)


@contextlib.asynccontextmanager
async def asked_for(request: Request, held: Arriving, reader: Reader, work: Work) -> AsyncIterator[ParsedBody]:
    """Give what a body asks for; raises `InvalidRequest`, or `HttpError` for a kind of body that isn't known.

    In the block a process is held only if there are images in it, and the body's bytes no more.
    """
    content_type = request.headers.get("content-type", "")
    kind = media_type(content_type)
    if kind not in (JSON, FORM):
        known = f"{JSON} or {FORM}"
        raise HttpError(415, f"the body is {kind[:60] or 'of no type'}; send {known}", code="type")
    async with contextlib.AsyncExitStack() as stack:
        reading = None
        async with held.body(request) as body:
            small = body.read(reader.limits.small_bytes + 1)
            large = len(small) > reader.limits.small_bytes
            parts = None if large else await work.run(held.key, apart, content_type, small)
            if parts is None or parts.uploads:
                reading = await stack.enter_async_context(reader.read(content_type, body, held.key))
                parts = reading.parts
        uploads = {} if reading is None else reading.uploads
        if not uploads:  # before an image is fetched, which takes a process, too
            await stack.aclose()
        held.add(len(parts.text))
        fields, digest = await work.run(held.key, _understood, parts, uploads)
        yield ParsedBody(fields=fields, digest=digest, reading=reading if uploads else None)


def _understood(parts: Parts, uploads: dict[str, str]) -> tuple[CreateVideo, str]:
    """Return a request's fields and digest; raises `InvalidRequest`."""
    fields = from_json(parts.text)
    named = [name for name in IMAGES if getattr(fields, name) is not None]
    if uploads and named:  # one that waits for a process while it holds another would keep others from theirs
        file = next(iter(uploads))
        message = f"{named[0]} was sent as a URL, and {file} as a file; send files alone, or URLs"
        raise InvalidRequest(message, named[0])
    said = json.dumps(fields.model_dump(exclude_none=True), sort_keys=True)  # The same where versions know more fields.
    return fields, hashlib.sha256(f"{said}\0{json.dumps(uploads)}".encode()).hexdigest()


@contextlib.asynccontextmanager
async def image_of(
    asked: ParsedBody, name: str, held: Arriving, reader: Reader, fetching: FetchSettings
) -> AsyncIterator[tuple[Reading, str] | None]:
    """Give who holds the image of a field, fetched if it is elsewhere, and its name there; raises `InvalidRequest`."""
    if asked.reading is not None and name in asked.reading.uploads:
        yield asked.reading, name
        return
    reference = getattr(asked.fields, name)
    if reference is None:
        yield None
        return
    async with contextlib.AsyncExitStack() as stack:
        with _named(name), held.file() as content:
            async with reader.fetches.turn(held.key), held.fetching():
                await fetch(reference.image_url, fetching, content, owner=held.key)
            reading = await stack.enter_async_context(reader.read(PICTURE, content, held.key))
        with _named(name):
            yield reading, IMAGE


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Have what is wrong with an image that was fetched raised with the name of its field."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(str(error), name if error.field in (IMAGE, None) else error.field) from None


def from_json(text: str | bytes) -> CreateVideo:
    """Return a request from JSON; raises `InvalidRequest`."""
    with _named_fields():
        # By Python's own reader, which lets half of a surrogate pair through, so that its field can be named. Numbers
        # may be texts: a form has no others, and LiteLLM's clients write them in JSON, too.
        return CreateVideo.model_validate(loads(text), strict=False)


@contextlib.contextmanager
def _named_fields() -> Iterator[None]:
    """Have what is wrong with a field raised as `InvalidRequest`, without what was given: it may be a prompt."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:80]
        if first["type"] == "extra_forbidden":
            known = (Adapter if first["loc"][0] == "loras" and len(first["loc"]) > 1 else CreateVideo).model_fields
            hint = did_you_mean(str(first["loc"][-1]), known)
            raise InvalidRequest(f"there is no field {param!r}{hint}; there are: {', '.join(known)}", param) from None
        # Said in JSON's words instead of Python's.
        reason = "Input should be an object" if first["type"] == "model_type" else first["msg"]
        raise InvalidRequest(f"{param or 'the body'}: {reason}", param) from None
