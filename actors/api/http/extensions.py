"""The route that continues a video, and answers to calls of OpenAI's retired API that this service doesn't have."""

from fastapi import APIRouter, Request, Response

from actors.api.http.error_answers import HttpError
from actors.api.http.objects import Video
from actors.api.http.openapi import describe_extension_body
from actors.api.http.parameters import AnyCaller, IdempotencyKey, Maker, Served
from actors.api.http.videos import REFUSED, answer_seen

router = APIRouter(prefix="/v1/videos", tags=["videos"])
_INSTEAD = {
    "edits": "POST /v1/videos with `video` and `strength` makes a video again from its frames, where GET /v1/models "
    "says `takes_video`; POST /v1/videos/{id}/remix makes one again with another prompt",
    "characters": "`input_reference` starts a video from an image, such as one of the character",
}


@router.post(
    "/extensions",
    summary="Continue a video",
    response_description="The new video, queued.",
    response_model=Video,
    responses=REFUSED,
    openapi_extra={"requestBody": describe_extension_body()},
)
async def extend(request: Request, service: Served, caller: Maker, key: IdempotencyKey) -> Response:
    """Accept a video that shows another one and then what follows its last frame; models of images can do it.

    `video` is a finished video of yours or a file, and `seconds` is how long the new part lasts. Only the last frame
    is seen, so movements don't go on by themselves: say in the prompt what moves. Settings that you omit are those of
    the video that is continued. Its frames aren't encoded again; those of a file are, in the new part's size and rate.
    """
    accepted = await service.submit(request, caller, key, extends=True)
    return await answer_seen(request, accepted.seen)


@router.post("/edits", include_in_schema=False)
@router.post("/characters", include_in_schema=False)
@router.get("/characters/{name}", include_in_schema=False)
async def refuse_unsupported(request: Request, caller: AnyCaller) -> Response:
    """Say what this service doesn't do, and what does something like it."""
    feature = request.url.path.split("/")[3]
    raise HttpError(400, f"no model of this service supports {feature}; {_INSTEAD[feature]}", code="unsupported")
