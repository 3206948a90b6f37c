"""Complete /docs and /openapi.json with bodies, errors, examples and a general description."""

from collections.abc import Callable
from typing import Any

from actors.api.core.create_video import CreateVideo
from actors.api.http.objects import ErrorBody, Video
from actors.api.untrusted.references import FILES, VIDEO
from actors.api.variants import VARIANTS
from wan_tpu.media.image import KINDS

DESCRIPTION = """
Videos from text and images. This is the `/v1/videos` API that OpenAI defined (its own was shut down on 24 September
2026), with more fields and routes: OpenAI's clients work with another base URL.

A video is a job: POST /v1/videos accepts it, GET /v1/videos/{video_id} says how far it is, and
GET /v1/videos/{video_id}/content returns the mp4. Bodies are JSON or forms. Times are Unix seconds, sizes
WIDTHxHEIGHT in pixels.
"""
TAGS = [
    {"name": "videos", "description": "Ask for videos, follow them, and get their files."},
    {"name": "models", "description": "What can be asked for, with defaults and limits."},
    {"name": "usage", "description": "What API keys have used."},
    {"name": "service", "description": "For operators and their machines."},
    {"name": "admin", "description": "The service's state and its keys, for operators; the page /admin shows them."},
]
_SCHEMAS = "#/components/schemas/"
_ERRORS = {
    400: "Something about the request is wrong: `param` names the field, `message` says what works.",
    401: "The API key is missing, invalid or expired.",
    403: "The key may not do this, or a page of another site asks.",
    404: "There is no such video, model or file, or it belongs to another key.",
    408: "The body came too slowly, or, of /v1/videos/sync, the video missed its deadline.",
    409: "The video is being made, was cancelled, or the Idempotency-Key came with another body.",
    413: "The body is too large, or the route takes none.",
    415: "The body is neither JSON nor a form.",
    421: "The service has no keys, and was asked under a name that isn't localhost.",
    429: "Too many requests, bodies, streams or waiting videos; `Retry-After` says when to try again.",
    500: "The service failed; its log says why. Of /v1/videos/sync: the video can't be made.",
    503: "Database, storage or room is missing now; `Retry-After` says when to try again.",
}
_ANYWHERE = (400, 401, 403, 413, 421, 429, 500, 503)
_EXAMPLES = {
    "text": {
        "summary": "From a text",
        "value": {"prompt": "a red ball rolls to the right over a brown floor", "size": "1280x720", "seconds": "5"},
    },
    "image": {
        "summary": "From an image, in four steps",
        "value": {
            "prompt": "the cat looks into the camera",
            "input_reference": {"image_url": "https://example.com/cat.png"},
            "preset": "lightning",
            "seed": 7,
        },
    },
}


def describe_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of error answers, including those that any route may give."""
    return {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in sorted({*_ANYWHERE, *statuses})}


def describe_create_body() -> dict[str, Any]:
    """Return the description of the body of POST /v1/videos."""
    about = "The video. A form may hold images as files; lists are JSON, `sigmas[]` or `loras[0][name]`."
    return _describe_body(about, examples=_EXAMPLES)


def describe_extension_body() -> dict[str, Any]:
    """Return the description of the body of an extension."""
    about = (
        "What follows, and the video: its id, a URL or a file, in a form as `video` or `video[id]`. All other fields "
        "of POST /v1/videos may be sent, except `input_reference` and `strength`."
    )
    example = {"prompt": "the ball falls off the table", "video": {"id": "video_" + "0" * 48}, "seconds": "5"}
    return _describe_body(about, example=example)


def _describe_body(about: str, **examples: Any) -> dict[str, Any]:
    content = {
        "application/json": {"schema": {"$ref": f"{_SCHEMAS}CreateVideo"}, **examples},
        "multipart/form-data": {"schema": {"$ref": f"{_SCHEMAS}CreateVideoForm"}},
    }
    return {"description": about, "required": True, "content": content}


def describe_remix_body() -> dict[str, Any]:
    """Return the description of the body of a remix."""
    return _describe_take("The new prompt.", "prompt")


def describe_redo_body() -> dict[str, Any]:
    """Return the description of the body of a segment that is made again."""
    return _describe_take("The segment's prompt, and its seed; a random one if omitted.", "prompt", "seed")


def _describe_take(about: str, *names: str) -> dict[str, Any]:
    fields = CreateVideo.model_json_schema()["properties"]
    schema = {"type": "object", "required": ["prompt"], "properties": {name: fields[name] for name in names}}
    example = {"prompt": "the same ball, in blue"}
    return {
        "description": about,
        "required": True,
        "content": {"application/json": {"schema": schema, "example": example}},
    }


CONTENT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole file; with `stream`, as it is decoded.",
        "content": {kind: {} for kind, _ in VARIANTS.values()},
    },
    206: {"description": "The part that `Range` asked for."},
    304: {"description": "The file is the one that `If-None-Match` names."},
    307: {"description": "The file is at the address in `Location`, which needs no key."},
    416: {"description": "The file has no such part."},
}
FINISHED: dict[int | str, dict[str, Any]] = CONTENT | {
    200: {"description": "The mp4; `x-video-id` is the video's id.", "content": {"video/mp4": {}}},
    202: {"model": Video, "description": "The video isn't finished yet: poll for it."},
}


def describe(generate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the description that FastAPI generates of the application, completed."""
    schema = generate()
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI adds it, but here such requests get 400.
            for response in operation["responses"].values():
                for media in response.get("content", {}).values():
                    if "itemSchema" in media:  # It is of OpenAPI 3.2. In 3.1 a stream has its events' schema.
                        media["schema"] = media.pop("itemSchema")
    schemas = schema["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    create = CreateVideo.model_json_schema(ref_template=_SCHEMAS + "{model}")
    schemas.update(create.pop("$defs"))
    schemas["CreateVideo"] = create
    # In a form these are files. In JSON they are objects, or just URLs.
    files, urls = {}, {}
    for name in FILES:
        field = create["properties"][name]
        kinds = "An mp4, or what else ffmpeg reads" if name == VIDEO else KINDS
        text = f"{field['description']} {kinds}, up to 20 MB unless the operator says otherwise."
        files[name] = {"type": "string", "format": "binary", "description": f"{text} A URL is taken, too."}
        urls[name] = field | {"anyOf": [*field["anyOf"], {"type": "string", "format": "uri"}], "description": text}
    schemas["CreateVideoForm"] = create | {"title": "CreateVideoForm", "properties": create["properties"] | files}
    create["properties"] = create["properties"] | urls
    return schema
