"""The routes of OpenAI's videos API, and ours beside them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from actors.api.estimates import poll_after_ms
from actors.api.http.bodies import read_body
from actors.api.http.content import send
from actors.api.http.error_answers import HttpError
from actors.api.http.objects import CreateVideo, ErrorBody, Variant, Video, VideoDeleted, VideoList, error_body, video
from actors.api.http.service import Service
from actors.api.variants import VARIANTS
from actors.jobs.errors import JobNotFound, StoreUnavailable
from actors.jobs.store import MAX_PAGE
from actors.jobs.tables import Job
from actors.observe.logs import log_event
from actors.storage.base import Missing
from wan_tpu.errors import InvalidRequest

log = logging.getLogger(__name__)

POLL_AFTER = "openai-poll-after-ms"
_KEY_LENGTH = 255
_LOOK_S = 0.5  # between two looks at a job whose events are followed


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of answers that aren't a success, those that any route may give included."""
    return {status: {"model": ErrorBody} for status in (401, 403, 421, 429, 500, 503, *statuses)}


async def service_of(request: Request) -> Service:
    """Return what the application was made with."""
    found: Service = request.app.state.service
    return found


Served = Annotated[Service, Depends(service_of)]


async def owner_of(request: Request, service: Served) -> str | None:
    """Return whose jobs may be seen: the key's id, or "" without keys; raises `HttpError`."""
    if not service.access.required:
        return ""
    key = service.access.admit(request.headers.get("authorization"))
    request.state.owner = key.id
    return key.id


Owner = Annotated[str, Depends(owner_of)]


async def found_job(service: Served, video_id: str, owner: Owner) -> tuple[Job, float | None]:
    """Return a job of the caller and in how many seconds it will be done; raises `JobNotFound`."""
    return await asyncio.to_thread(service.look_now, video_id, owner)


# Looked for before an answer begins, so that a 404 is an answer also where events follow.
Found = Annotated[tuple[Job, float | None], Depends(found_job)]
router = APIRouter(prefix="/v1/videos", tags=["videos"])

_JSON = CreateVideo.model_json_schema(ref_template="#/components/schemas/{model}")
_JSON.pop("$defs")
_FILE = {"input_reference": {"type": "string", "format": "binary"}}
_FORM = {"type": "object", "required": ["prompt"], "properties": _JSON["properties"] | _FILE}
_BODY = {"required": True, "content": {"application/json": {"schema": _JSON}, "multipart/form-data": {"schema": _FORM}}}


@router.post("", response_model=Video, responses=errors(400, 409, 413, 415), openapi_extra={"requestBody": _BODY})
async def create(
    request: Request,
    service: Served,
    owner: Owner,
    idempotency_key: Annotated[str | None, Header(max_length=_KEY_LENGTH)] = None,
) -> Response:
    """Accept a video to be made. It is then finished, or failed with a reason, whatever dies."""
    if idempotency_key is not None and (not idempotency_key.isprintable() or not idempotency_key):
        raise InvalidRequest("the Idempotency-Key is empty or has control characters; give a random one")
    asked = await read_body(request, service.images)
    job, eta_s = await service.submit(asked, owner, idempotency_key)
    request.state.job = job.id
    return _answer(video(job, eta_s), poll_after_ms(eta_s))


@router.get("", response_model=VideoList, responses=errors(400, 404))
async def list_(
    service: Served,
    owner: Owner,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List videos, newest first; `after` is the `last_id` of the page before."""

    def page() -> VideoList:
        found = service.store.list(owner, after=after, limit=limit, order=order)
        videos = [video(job, service.forecast.eta_s(job)) for job in found.jobs]
        first, last = (videos[0].id, videos[-1].id) if videos else (None, None)
        return VideoList(data=videos, first_id=first, last_id=last, has_more=found.more)

    return _answer(await asyncio.to_thread(page))


@router.get("/{video_id}", response_model=Video, responses=errors(404))
async def retrieve(found: Found) -> Response:
    """Return one video, how far it is, and when it will be done."""
    job, eta_s = found
    return _answer(video(job, eta_s), None if job.ended else poll_after_ms(eta_s))


@router.get(
    "/{video_id}/content",
    response_class=Response,
    responses=errors(400, 404)
    | {
        200: {"content": {kind: {} for kind, _ in VARIANTS.values()}},
        206: {"description": "A part of it"},
        304: {"description": "As before"},
        416: {"description": "No such part"},
    },
)
async def content(
    request: Request, service: Served, video_id: str, owner: Owner, variant: Variant = "video"
) -> Response:
    """Return the mp4 of a completed video, or a picture of it. Ranges and If-None-Match are honoured."""
    job = await asyncio.to_thread(service.store.get, video_id, owner)
    if job.status != "completed":
        raise HttpError(404, f"{job.id} is {job.status}; only completed videos have content", code="video_not_ready")
    name = job.results.get(variant)
    if name is None:
        raise HttpError(404, f"{job.id} has no {variant}", code="variant_not_found", param="variant")
    try:
        media_type, ending = VARIANTS[variant]
        return await send(request, service.storage, name, media_type, f"{job.id}.{ending}")
    except Missing:
        raise HttpError(404, f"{job.id} is gone: it was deleted, or has expired", code="video_not_found") from None


@router.delete("/{video_id}", response_model=VideoDeleted, responses=errors(404, 409))
async def delete(service: Served, video_id: str, owner: Owner) -> Response:
    """Remove a video and its files. One in progress is to be cancelled first."""
    await asyncio.to_thread(service.store.delete, video_id, owner)
    return _answer(VideoDeleted(id=video_id))


@router.post("/{video_id}/cancel", response_model=Video, responses=errors(404))
async def cancel(service: Served, video_id: str, owner: Owner) -> Response:
    """Have a video not made: it becomes `failed` with code `cancelled`. One that has ended stays as it is."""
    job = await asyncio.to_thread(service.store.cancel, video_id, owner)
    return _answer(video(job, service.forecast.eta_s(job)))


class Events(EventSourceResponse):
    """Server-sent events. Without a media type of its own, since FastAPI would describe the errors with it too."""

    media_type = None  # type: ignore[assignment]


@router.get("/{video_id}/events", response_class=Events, responses=errors(404))
async def follow(service: Served, found: Found) -> AsyncIterator[ServerSentEvent]:
    """Follow a video: "progress" events with the video object, then "completed" or "failed", and the stream ends.

    A job that is deleted meanwhile ends with "error".
    """
    (job, eta_s), last = found, None
    while True:
        shown = video(job, eta_s)
        news = shown.model_copy(update={"eta_seconds": None})  # which alone is no news: it changes with every look
        if news != last:
            yield ServerSentEvent(event=job.status if job.ended else "progress", data=shown)
            last = news
        if job.ended:
            return
        await asyncio.sleep(_LOOK_S)
        try:
            job, eta_s = await asyncio.to_thread(service.look_now, job.id, job.owner)
        except JobNotFound as gone:
            yield ServerSentEvent(event="error", data=error_body(404, str(gone), code="video_not_found"))
            return
        except StoreUnavailable as error:
            log_event(log, "events wait", logging.WARNING, job=job.id, reason=str(error))


def _answer(value: Video | VideoList | VideoDeleted, poll_after_ms: int | None = None) -> Response:
    headers = {"Cache-Control": "no-store"} | ({} if poll_after_ms is None else {POLL_AFTER: str(poll_after_ms)})
    return Response(value.model_dump_json(), 200, headers, "application/json")
