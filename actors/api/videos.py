"""The routes of OpenAI's videos API, and ours beside them."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from actors.api.bodies import read_body
from actors.api.content import send
from actors.api.events import events
from actors.api.failures import Problem
from actors.api.forms import InvalidField
from actors.api.objects import VARIANTS, CreateVideo, ErrorBody, Variant, Video, VideoDeleted, VideoList, video_list
from actors.api.service import Service
from actors.jobs.store import MAX_PAGE
from actors.jobs.values import Job
from actors.storage import Missing

POLL_AFTER = "openai-poll-after-ms"
_ENDINGS = {"video": "mp4", "thumbnail": "webp", "spritesheet": "jpg"}
_KEY_LENGTH = 255


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of answers that aren't a success, those that any route may give included."""
    return {status: {"model": ErrorBody} for status in (401, 403, 421, 429, 500, 503, *statuses)}


def service_of(request: Request) -> Service:
    """Return what the application was made with."""
    found: Service = request.app.state.service
    return found


async def owner_of(request: Request) -> str | None:
    """Return whose jobs may be seen; raises `Refused`. Without keys all are everybody's: they belong to ""."""
    access = service_of(request).access
    if access is None:
        return ""
    key = access.admit(request.headers.get("authorization"))
    request.state.owner = key.id
    return key.id


Owner = Annotated[str, Depends(owner_of)]
router = APIRouter(prefix="/v1/videos", tags=["videos"])

_BODY = {
    "required": True,
    "content": {
        "application/json": {"schema": CreateVideo.model_json_schema(ref_template="#/components/schemas/{model}")},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["prompt"],
                "properties": {
                    **{
                        name: schema
                        for name, schema in CreateVideo.model_json_schema()["properties"].items()
                        if name != "input_reference"
                    },
                    "input_reference": {"type": "string", "format": "binary"},
                },
            }
        },
    },
}
_BODY["content"]["application/json"]["schema"].pop("$defs", None)  # type: ignore[index]


@router.post("", response_model=Video, responses=errors(400, 409, 413, 415), openapi_extra={"requestBody": _BODY})
async def create(
    request: Request,
    owner: Owner,
    idempotency_key: Annotated[str | None, Header(max_length=_KEY_LENGTH)] = None,
) -> Response:
    """Accept a video to be made. It is then finished, or failed with a reason, whatever dies."""
    service = service_of(request)
    if idempotency_key is not None and (not idempotency_key.isprintable() or not idempotency_key):
        raise InvalidField("the Idempotency-Key is empty or has control characters; give a random one", None)
    asked = await read_body(request, service.images)
    job, outlook, _ = await service.submit(asked, owner, idempotency_key)
    request.state.job = job.id
    return _answer(service.video(job, outlook), outlook.poll_after_ms)


@router.get("", response_model=VideoList, responses=errors(400, 404))
async def list_(
    request: Request,
    owner: Owner,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List videos, newest first; `after` is the `last_id` of the page before."""
    service = service_of(request)

    def page() -> VideoList:
        found = service.store.list(owner, after=after, limit=limit, order=order)
        outlooks = service.forecast.outlooks(found.jobs)
        return video_list([service.video(*pair) for pair in zip(found.jobs, outlooks, strict=True)], more=found.more)

    return _answer(await asyncio.to_thread(page))


@router.get("/{video_id}", response_model=Video, responses=errors(404))
async def retrieve(request: Request, video_id: str, owner: Owner) -> Response:
    """Return one video, how far it is, and when it will be done."""
    service = service_of(request)
    job, outlook = await asyncio.to_thread(service.look_now, video_id, owner)
    return _answer(service.video(job, outlook), None if job.ended else outlook.poll_after_ms)


@router.get(
    "/{video_id}/content",
    response_class=Response,
    responses=errors(400, 404)
    | {
        200: {"content": {kind: {} for kind in VARIANTS.values()}},
        206: {"description": "A part of it"},
        304: {"description": "As before"},
        416: {"description": "No such part"},
    },
)
async def content(request: Request, video_id: str, owner: Owner, variant: Variant = "video") -> Response:
    """Return the mp4 of a completed video, or a picture of it. Ranges and If-None-Match are honoured."""
    service = service_of(request)
    job = await asyncio.to_thread(service.store.get, video_id, owner)
    if job.status != "completed":
        raise Problem(404, f"{job.id} is {job.status}; only completed videos have content", code="video_not_ready")
    name = job.results.get(variant)
    if name is None:
        raise Problem(404, f"{job.id} has no {variant}", code="variant_not_found", param="variant")
    try:
        return await send(request, service.storage, name, VARIANTS[variant], f"{job.id}.{_ENDINGS[variant]}")
    except Missing:
        raise Problem(404, f"{job.id} is gone: it was deleted, or has expired", code="video_not_found") from None


@router.delete("/{video_id}", response_model=VideoDeleted, responses=errors(404, 409))
async def delete(request: Request, video_id: str, owner: Owner) -> Response:
    """Remove a video and its files. One in progress is to be cancelled first."""
    service = service_of(request)
    await asyncio.to_thread(service.store.delete, video_id, owner)
    return _answer(VideoDeleted(id=video_id))


@router.post("/{video_id}/cancel", response_model=Video, responses=errors(404))
async def cancel(request: Request, video_id: str, owner: Owner) -> Response:
    """Have a video not made: it becomes `failed` with code `cancelled`. One that has ended stays as it is."""
    service = service_of(request)

    def stop() -> tuple[Job, Video]:
        job = service.store.cancel(video_id, owner)
        return job, service.video(job, service.outlook_now(job))

    _, shown = await asyncio.to_thread(stop)
    return _answer(shown)


@router.get(
    "/{video_id}/events",
    response_class=StreamingResponse,
    responses=errors(404) | {200: {"content": {"text/event-stream": {}}}},
)
async def follow(request: Request, video_id: str, owner: Owner) -> Response:
    """Follow a video: "progress" events with the video object, then "completed" or "failed"."""
    service = service_of(request)
    await asyncio.to_thread(service.store.get, video_id, owner)  # a 404 is an answer, not an event
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(service, video_id, owner), 200, headers, "text/event-stream")


def _answer(value: Video | VideoList | VideoDeleted, poll_after_ms: int | None = None) -> Response:
    headers = {"Cache-Control": "no-store"} | ({} if poll_after_ms is None else {POLL_AFTER: str(poll_after_ms)})
    return Response(value.model_dump_json(), 200, headers, "application/json")
