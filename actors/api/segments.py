"""The segments of a video. Each one after the first continues the video so far, with a prompt of its own."""

import dataclasses

from wan_tpu.request import GenerationRequest

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
