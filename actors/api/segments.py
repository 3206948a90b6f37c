"""The segments of a video. Each one after the first continues the video so far, with a prompt of its own."""

import dataclasses

from wan_tpu.errors import InvalidRequest
from wan_tpu.model_limits import FULL_STRENGTH
from wan_tpu.request import IMAGES, GenerationRequest
from wan_tpu.spec import ModelSpec

_SEEDS = 2**63


def continue_request(first: GenerationRequest, prompt: str, index: int) -> GenerationRequest:
    """Return the request of a later segment, except for what it continues: an image or a video.

    Args:
        first: The request of the first segment.
        prompt: The segment's own prompt.
        index: The segment's number, counted from 0. Each segment has another seed, so that motion doesn't repeat.
    """
    inputs = dict.fromkeys(("image", "last_image", "video", "strength"))
    return dataclasses.replace(first, prompt=prompt, seed=(first.seed + index) % _SEEDS, **inputs)


def check_segment(spec: ModelSpec, request: GenerationRequest) -> None:
    """Raise `InvalidRequest` if a model can't make a later segment; its request has no image or video yet."""
    if spec.continues_video:
        spec.plan(dataclasses.replace(request, strength=FULL_STRENGTH), video=True)
        return
    try:
        spec.plan(request, image=True)
    except InvalidRequest as error:
        if error.field not in IMAGES:
            raise
        # The client hasn't sent the image that the message would be about.
        message = f"each segment after the first begins with an image, the last frame before it: {error}"
        raise InvalidRequest(message, "next_prompts") from None
