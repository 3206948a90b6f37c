"""The routes of the `/v1/videos` API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from actors.api.core.access import Caller
from actors.api.core.errors import HttpError
from actors.api.core.following import PROMPTS, EstimatedJob, without_prompts
from actors.api.core.intake import Accepted
from actors.api.core.service import Service
from actors.api.estimates import choose_poll_ms
from actors.api.http.content import send
from actors.api.http.error_answers import answer
from actors.api.http.job_failures import explain
from actors.api.http.objects import Variant, Video, VideoDeleted, VideoList, to_video
from actors.api.http.openapi import (
    CONTENT,
    FINISHED,
    describe_create_body,
    describe_errors,
    describe_extension_body,
    describe_redo_body,
    describe_remix_body,
)
from actors.api.http.parameters import (
    AnyCaller,
    Ender,
    IdempotencyKey,
    Maker,
    SegmentNumber,
    Served,
    VideoId,
    Watcher,
    Which,
)
from actors.api.http.watching import watch
from actors.api.variants import VARIANTS
from actors.jobs.errors import JobNotFound, StoreUnavailable
from actors.jobs.store import MAX_PAGE
from actors.jobs.tables import Job
from actors.jobs.values import PREVIEW, Status
from actors.jobs.watching import share
from wan_tpu.storage.base import Missing

POLL_AFTER = "openai-poll-after-ms"

router = APIRouter(prefix="/v1/videos", tags=["videos"])

_REFUSED = describe_errors(408, 409, 415)
# What does something like a call of OpenAI's API that this service doesn't have.
_INSTEAD = {
    "edits": "POST /v1/videos with `video` and `strength` makes a video again from its frames, where GET /v1/models "
    "says `takes_video`; POST /v1/videos/{id}/remix makes one again with another prompt",
    "characters": "`input_reference` starts a video from an image, such as one of the character",
}


@router.post(
    "",
    summary="Ask for a video",
    response_description="The video, queued.",
    response_model=Video,
    responses=_REFUSED,
    openapi_extra={"requestBody": describe_create_body()},
)
async def create(request: Request, service: Served, caller: Maker, key: IdempotencyKey) -> Response:
    """Accept a video to be made, and return it at once. It is then finished, or failed with a reason.

    Poll it, follow its events, or give a `webhook_url`.
    """
    accepted = await service.intake.submit(request, caller, key)
    return await _answer_seen(request, await service.look_at_accepted(accepted.job))


@router.post(
    "/sync",
    summary="Ask for a video and wait for it",
    response_class=Response,
    responses=_REFUSED | FINISHED,
    openapi_extra={"requestBody": describe_create_body()},
)
async def create_and_wait(request: Request, service: Served, caller: Maker, key: IdempotencyKey) -> Response:
    """Have a short video made, and return its mp4, with its id in the header `x-video-id`.

    A video that isn't there in time is made on, and the answer is 202 with the video object: poll for it. One whose
    client hangs up is cancelled, unless the request has an idempotency key or others follow the video.
    """
    with service.streams.hold(caller.owner):  # First, so that nothing is accepted that couldn't be waited for.
        accepted = await service.intake.submit(request, caller, key, alone=True)
        seen = await _wait_for_end(request, service, caller, accepted)
    job = seen[0]
    if not job.has_ended:
        waiting = await _answer_seen(request, seen)
        waiting.status_code = 202
        return waiting
    request.state.job = job.id
    if job.status == "failed":
        status = explain(job.error_code).status
        # OpenAI's clients repeat 408, 409 and all from 500 on, which would have the same video computed again.
        headers = {} if status == 503 else {"x-should-retry": "false"}
        raise HttpError(status, f"{job.id} failed: {job.error_message}", code=job.error_code, headers=headers)
    response = await _send_content(request, service, job, "video")
    response.headers["x-video-id"] = job.id
    return response


async def _wait_for_end(request: Request, service: Service, caller: Caller, accepted: Accepted) -> EstimatedJob:
    """Return a job when it has ended, or when its client has waited long enough.

    If the client disconnects, a job that this request has created is cancelled, unless others may wait for it: it has
    an idempotency key, the request was repeated, or others have followed or watched the job.
    """
    seen = await service.look_at_accepted(accepted.job)
    job, ends = accepted.job.id, service.settings.reliability.answer_s
    disconnect = asyncio.create_task(_wait_for_disconnect(request))
    ending = asyncio.create_task(_follow_to_end(service, seen, caller))
    try:
        await asyncio.wait([disconnect, ending], timeout=ends, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return ending.result()
        if disconnect.done() and accepted.private is not None:
            await asyncio.to_thread(service.store.cancel_private, job, accepted.private)
        return await asyncio.to_thread(service.look, job, None)
    except StoreUnavailable:
        return seen
    finally:
        disconnect.cancel()
        ending.cancel()


@router.post(
    "/extensions",
    summary="Continue a video",
    response_description="The new video, queued.",
    response_model=Video,
    responses=_REFUSED,
    openapi_extra={"requestBody": describe_extension_body()},
)
async def extend(request: Request, service: Served, caller: Maker, key: IdempotencyKey) -> Response:
    """Accept a video that shows another one and then what follows its last frame; models of images can do it.

    `video` is a finished video of yours or a file, and `seconds` is how long the new part lasts. Only the last frame
    is seen, so movements don't go on by themselves: say in the prompt what moves. Settings that you omit are those of
    the video that is continued. Its frames aren't encoded again; those of a file are, in the new part's size and rate.
    """
    accepted = await service.intake.submit(request, caller, key, extends=True)
    return await _answer_seen(request, await service.look_at_accepted(accepted.job))


@router.post("/edits", include_in_schema=False)
@router.post("/characters", include_in_schema=False)
@router.get("/characters/{name}", include_in_schema=False)
async def refuse_unsupported(request: Request, caller: AnyCaller) -> Response:
    """Say what this service doesn't do, and what does something like it."""
    feature = request.url.path.split("/")[3]
    raise HttpError(400, f"no model of this service supports {feature}; {_INSTEAD[feature]}", code="unsupported")


@router.get(
    "",
    summary="List videos",
    response_description="The page.",
    response_model=VideoList,
    responses=describe_errors(404),
)
async def list_(
    service: Served,
    caller: Watcher,
    after: Annotated[str | None, Query(max_length=80, description="`last_id` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="How many videos a page has at most.")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="`desc`: newest first; `asc`: oldest first.")] = "desc",
    status: Annotated[Status | None, Query(description="Only videos of this status.")] = None,
) -> Response:
    """Return a page of your videos. One of long requests ends at about 1 MB, before `limit`: `has_more` says so."""

    def page() -> Response:
        page_now = service.store.list(caller.sees, after=after, limit=limit, order=order, status=status)
        videos = [to_video(job, service.forecast.estimate_eta_s(job)) for job in page_now.jobs]
        first, last = (videos[0].id, videos[-1].id) if videos else (None, None)
        return _answer(VideoList(data=videos, first_id=first, last_id=last, has_more=page_now.has_more))

    return await service.work.run(caller.owner, page)


@router.get(
    "/{video_id}",
    summary="Get a video's state",
    response_description="The video.",
    response_model=Video,
    responses=describe_errors(404),
)
async def retrieve(service: Served, video_id: VideoId, caller: Watcher) -> Response:
    """Return one video: its status, how far it is, and in how many seconds it will be finished.

    The header `openai-poll-after-ms` says when to ask again.
    """
    return await asyncio.to_thread(lambda: _answer_video(service.look(video_id, caller.sees)))


async def _hold_stream(
    service: Served,
    caller: Watcher,
    stream: Annotated[bool, Query(description="Send a video that isn't finished yet while it is decoded.")] = False,
) -> AsyncIterator[bool]:
    with service.streams.hold(caller.owner) if stream else contextlib.nullcontext():
        yield stream


@router.get(
    "/{video_id}/content",
    summary="Download a video's file",
    response_class=Response,
    responses=describe_errors(404) | CONTENT,
)
async def content(
    request: Request,
    service: Served,
    video_id: VideoId,
    caller: Watcher,
    stream: Annotated[bool, Depends(_hold_stream)],
    variant: Which = "video",
) -> Response:
    """Return the mp4 of a completed video, or a picture of it. Ranges and If-None-Match are honoured.

    The images that a video begins and ends with are there from its start, as PNG in the video's size. `preview`, a JPEG
    of the unfinished video, is there after each quarter of the steps until the video is completed. With `stream=1`
    the mp4 of a video that waits or is being made comes while it is decoded: the answer begins at once, brings a
    fragmented mp4 that can be played as it arrives, and ends with the video. It has no length and no ranges. If the
    video fails, the connection is cut.
    """
    job = await asyncio.to_thread(service.store.get, video_id, caller.sees)
    if stream and variant == "video" and not job.has_ended:
        await asyncio.to_thread(share, service.database, job)
        return await watch(request, service, job, caller.owner)
    return await _send_content(request, service, job, variant)


@router.delete(
    "/{video_id}",
    summary="Delete a video",
    response_description="The video is deleted.",
    response_model=VideoDeleted,
    responses=describe_errors(404, 409),
)
async def delete(service: Served, video_id: VideoId, caller: Ender) -> Response:
    """Delete a video and its files. One that waits is cancelled; one in progress has to be cancelled first."""
    await asyncio.to_thread(service.store.delete, video_id, caller.sees)
    return _answer(VideoDeleted(id=video_id))


@router.post(
    "/{video_id}/cancel",
    summary="Cancel a video",
    response_description="The video, stopped or about to be.",
    response_model=Video,
    responses=describe_errors(404),
)
async def cancel(service: Served, video_id: VideoId, caller: Ender) -> Response:
    """Stop a video: it becomes `failed` with code `cancelled`. One that has ended stays as it is.

    The step that computes is finished first: `eta_seconds` of a video in progress says how long steps take.
    """

    def cancel_now() -> Response:
        job = service.store.cancel(video_id, caller.sees)
        return _answer(to_video(job, service.forecast.estimate_eta_s(job)))

    return await asyncio.to_thread(cancel_now)


@router.post(
    "/{video_id}/remix",
    summary="Make a video again with another prompt",
    response_description="The new video, queued.",
    response_model=Video,
    responses=_REFUSED | describe_errors(404),
    openapi_extra={"requestBody": describe_remix_body()},
)
async def remix(request: Request, service: Served, video_id: VideoId, caller: Maker, key: IdempotencyKey) -> Response:
    """Accept a video with the request of another one, its images and seed included, and a new prompt."""
    return await _accept_again(request, service, video_id, caller, key)


@router.post(
    "/{video_id}/segments/{segment}/redo",
    summary="Make one segment again",
    response_description="The new video, queued.",
    response_model=Video,
    responses=_REFUSED | describe_errors(404),
    openapi_extra={"requestBody": describe_redo_body()},
)
async def redo(
    request: Request, service: Served, video_id: VideoId, segment: SegmentNumber, caller: Maker, key: IdempotencyKey
) -> Response:
    """Accept a video like another one, of which one segment, counted from 1, is made again, with a prompt and a seed.

    It begins with the end of the segment before and ends as the old one did, so the segments around it stay. For videos
    of several segments with `continue_by` motion.
    """
    return await _accept_again(request, service, video_id, caller, key, segment)


class Events(EventSourceResponse):
    """Server-sent events. Without a media type of its own, since FastAPI would describe the errors with it too."""

    media_type = None  # type: ignore[assignment]


async def _follow_video(
    service: Served, video_id: VideoId, caller: Watcher
) -> AsyncIterator[AsyncIterator[EstimatedJob]]:
    # Read the job before the answer begins, so that the status can still be 404.
    with service.streams.hold(caller.owner):
        seen = without_prompts(await asyncio.to_thread(service.look, video_id, caller.sees))
        await asyncio.to_thread(share, service.database, seen[0])
        async with service.following.follow(seen[0].id, seen, caller.owner) as news:
            yield news


@router.get(
    "/{video_id}/events",
    summary="Follow a video",
    response_description="The stream of events.",
    response_class=Events,
    responses=describe_errors(404),
)
async def follow(
    seen: Annotated[AsyncIterator[EstimatedJob], Depends(_follow_video)],
) -> AsyncIterator[ServerSentEvent]:
    """Stream server-sent events: `progress` with the video object, then `completed` or `failed`, and the stream ends.

    The object comes without its prompts, since each event would repeat them. A job that is deleted meanwhile ends with
    "error", as does a stream whose key is revoked.
    """
    try:
        async for job, eta_s in seen:
            text = to_video(job, eta_s).model_dump_json(exclude=set(PROMPTS))
            yield ServerSentEvent(event=job.status if job.has_ended else "progress", raw_data=text)
    except (JobNotFound, HttpError) as error:
        yield ServerSentEvent(event="error", raw_data=bytes(answer(error).body).decode())


async def _send_content(request: Request, service: Service, job: Job, variant: Variant) -> Response:
    inputs = {"input_reference": job.input_image, "last_frame": job.input_last_image, "input_video": job.input_video}
    if variant not in (*inputs, PREVIEW) and job.status != "completed":
        raise HttpError(
            404,
            f"{job.id} is {job.status}; content is available only when a video is completed",
            code="video_not_ready",
        )
    name = inputs.get(variant) or job.results.get(variant)
    if name is None:
        raise HttpError(404, f"{job.id} has no {variant}", code="variant_not_found", param="variant")
    try:
        media_type, ending = VARIANTS[variant]
        url_s, stall_s = service.settings.url_s, service.settings.limits.download_stall_s
        filename = f"{job.id}.{ending}"
        response = await send(request, service.storage, name, media_type, filename, url_s, stall_s=stall_s)
        if variant == PREVIEW and "ETag" in response.headers:  # The next one is at the same address.
            response.headers["Cache-Control"] = "no-cache"
        return response
    except Missing:
        raise HttpError(
            404, f"{job.id} no longer exists: it was deleted, or has expired", code="video_not_found"
        ) from None


async def _accept_again(
    request: Request, service: Service, video_id: str, caller: Caller, key: str | None, segment: int | None = None
) -> Response:
    """Accept a video, or a segment of it, to be made again."""
    accepted = await service.intake.remix(video_id, request, caller, key, segment=segment)
    return await _answer_seen(request, await service.look_at_accepted(accepted.job))


async def _follow_to_end(service: Service, seen: EstimatedJob, caller: Caller) -> EstimatedJob:
    async with service.following.follow(seen[0].id, seen, caller.owner) as stream:
        async for last in stream:
            seen = last
    return seen


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client disconnects. Its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_seen(request: Request, seen: EstimatedJob) -> Response:
    """Return a video as an answer, encoded in a thread, since it holds long texts."""
    request.state.job = seen[0].id
    return await asyncio.to_thread(_answer_video, seen)


def _answer_video(seen: EstimatedJob) -> Response:
    job, eta_s = seen
    return _answer(to_video(job, eta_s), None if job.has_ended else choose_poll_ms(eta_s))


def _answer(value: Video | VideoList | VideoDeleted, poll_after_ms: int | None = None) -> Response:
    headers = {"Cache-Control": "no-store"} | ({} if poll_after_ms is None else {POLL_AFTER: str(poll_after_ms)})
    return Response(value.model_dump_json(), 200, headers, "application/json")
