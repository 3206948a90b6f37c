"""Receive a request's body, and parse it into fields and files."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator

from pydantic import ValidationError
from starlette.requests import Request

from actors.api.core.create_video import Adapter, CreateVideo
from actors.api.core.errors import HttpError
from actors.api.core.receiving import IncomingRequest
from actors.api.fair_semaphore import Work
from actors.api.untrusted.body_parts import FORM, JSON, URLENCODED, Parts, parse_media_type, split_body
from actors.api.untrusted.json_text import loads
from actors.api.untrusted.reader import Reader, Reading
from actors.api.untrusted.references import FILES, REFERENCES, VIDEO, name_reference
from wan_tpu.errors import InvalidRequest
from wan_tpu.suggest import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedBody:
    """A parsed body."""

    fields: CreateVideo
    digest: str  # Identifies a body with the same content.
    reading: Reading | None  # The process that holds the body's files, if it has any.

    def has(self, name: str) -> bool:
        """Return whether a field has an image or a video."""
        return getattr(self.fields, name) is not None or (self.reading is not None and name in self.reading.uploads)

    @property
    def locks_sound(self) -> bool:
        """Whether the sound among its references becomes the video's."""
        return self.fields.audio_mode == "lock_source"

    def list_reference_kinds(self) -> list[str]:
        """Return what each of `input_references` is: what its sender says, or else what its file is."""
        kinds = {} if self.reading is None else self.reading.kinds
        references = enumerate(self.fields.input_references or ())
        return [reference.kind or kinds.get(name_reference(index), "") for index, reference in references]

    def get_size(self, *names: str) -> tuple[int, int] | None:
        """Return the (height, width) of the first of some files, or None if none of them came with the body."""
        sizes = {} if self.reading is None else self.reading.sizes
        return next((sizes[name] for name in names if name in sizes), None)


@contextlib.asynccontextmanager
async def parse_body(
    request: Request, incoming: IncomingRequest, reader: Reader, work: Work, *, purpose: str = ""
) -> AsyncIterator[ParsedBody]:
    """Receive and parse a request's body.

    Within the block, a process is kept only if the body has files, and the body's bytes are no longer held.

    Args:
        reader: Starts processes that parse large bodies and images.
        work: Threads that parse small bodies.
        purpose: What the body is for. The digest depends on it, so the same body differs between purposes.

    Yields:
        The parsed body.

    Raises:
        InvalidRequest: The body is invalid.
        HttpError: The body is of an unsupported type, or can't be received.
    """
    content_type = request.headers.get("content-type", "")
    kind = parse_media_type(content_type)
    if kind not in (JSON, FORM, URLENCODED):
        known = f"{JSON} or {FORM}"
        raise HttpError(415, f"the body is {kind[:60] or 'of no type'}; send {known}", code="type")
    async with contextlib.AsyncExitStack() as stack:
        reading = None
        async with incoming.receive_body(request) as body:
            small = body.read(reader.limits.small_bytes + 1)
            large = len(small) > reader.limits.small_bytes
            parts = None if large else await work.run(incoming.key, split_body, content_type, small)
            if parts is None or parts.uploads:
                reading = await stack.enter_async_context(reader.read(content_type, body, incoming.key))
                parts = reading.parts
        uploads = {} if reading is None else reading.uploads
        if not uploads:  # Free this process before a file is fetched, which needs a process as well.
            await stack.aclose()
        incoming.add(len(parts.text))
        fields, digest = await work.run(incoming.key, _validate, parts, uploads, purpose)
        yield ParsedBody(fields=fields, digest=digest, reading=reading if uploads else None)


def _validate(parts: Parts, uploads: dict[str, str], purpose: str) -> tuple[CreateVideo, str]:
    """Validate a body; return its fields and digest. Raises `InvalidRequest`."""
    fields = parse_json(parts.text)
    files = [name for name in FILES if getattr(fields, name) is not None]
    files += [REFERENCES for reference in fields.input_references or () if reference.url is not None]
    if uploads and files:  # A request that holds one process while it waits for another could block other requests.
        file = next(iter(uploads))
        kind = "an id" if files[0] == VIDEO and fields.video is not None and fields.video.id is not None else "a URL"
        message = f"{files[0]} was sent as {kind}, and {file} as a file; send files alone, or URLs"
        raise InvalidRequest(message, files[0])
    # Unset fields are left out, so that a version with more fields computes the same digest.
    text = json.dumps(fields.model_dump(exclude_none=True), sort_keys=True)
    return fields, hashlib.sha256(f"{purpose}{text}\0{json.dumps(uploads)}".encode()).hexdigest()


def parse_json(text: str | bytes) -> CreateVideo:
    """Parse and validate JSON; raises `InvalidRequest`, which doesn't quote values: they may be prompts."""
    try:
        # Python's own parser accepts lone surrogates, so that the error can name the field. Numbers may be strings:
        # forms have nothing else, and LiteLLM's clients send them in JSON, too.
        return CreateVideo.model_validate(loads(text), strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:80]
        if first["type"] == "extra_forbidden":
            known = (Adapter if first["loc"][0] == "loras" and len(first["loc"]) > 1 else CreateVideo).model_fields
            hint = did_you_mean(str(first["loc"][-1]), known)
            raise InvalidRequest(
                f"there is no field {param!r}{hint}; the fields are: {', '.join(known)}", param
            ) from None
        # Use JSON's term instead of Python's.
        reason = "Input should be an object" if first["type"] == "model_type" else first["msg"]
        raise InvalidRequest(f"{param or 'the body'}: {reason}", param) from None
