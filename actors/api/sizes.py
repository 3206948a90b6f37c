"""Admit only requests of a size that fits the slices' memory."""

import dataclasses
from collections.abc import Sequence

from wan_tpu.errors import InvalidRequest
from wan_tpu.model_limits import ModelLimits
from wan_tpu.plan import RequestPlan
from wan_tpu.spec import ModelSpec

Size = tuple[int, int, int]  # Height, width and number of frames.


def check_size(plan: RequestPlan, largest: Sequence[Size], model: ModelSpec) -> RequestPlan:
    """Return a request's plan; if its length is open, and its longest video is too large, with a shorter longest one.

    Args:
        plan: The plan.
        largest: Sizes that fit; if empty, any size does.
        model: The model, whose latents' sizes and videos' lengths count.

    Raises:
        InvalidRequest: The request is larger than what the operator says fits the slices' memory.
    """
    request = plan.request
    requested_size = height, width, frames = request.height, request.width, request.frames
    if not largest or _fits(requested_size, largest, model):
        return plan
    nearest = _find_nearest(requested_size, largest, model)
    if plan.has_open_length and nearest is not None and nearest[:2] == (height, width):
        most = nearest[2] / request.fps
        return plan.with_request(dataclasses.replace(request, frames=nearest[2], max_seconds=most))
    remedy = "no size is allowed"
    if nearest is not None:
        remedy = "the nearest that is allowed is {1}x{0} with {2} frames".format(*nearest)
    raise InvalidRequest(
        f"{width}x{height} with {frames} frames exceeds the largest size that the operator of this service allows; "
        f"{remedy}",
        "size" if nearest is None or nearest[2] == frames else "frames",
    )


def _fits(size: Size, largest: Sequence[Size], model: ModelLimits) -> bool:
    """Return whether a size has at most the tokens (for experts) and pixels a frame (for the VAE) of a largest one."""
    return any(
        _count_latent_pixels(size, model) <= _count_latent_pixels(size_limit, model)
        and size[0] * size[1] <= size_limit[0] * size_limit[1]
        for size_limit in largest
    )


def _count_latent_pixels(size: Size, model: ModelLimits) -> int:
    """Return the pixels of all latent frames, which the number of tokens is proportional to."""
    height, width, frames = size
    return height * width * model.latent_frames(frames)


def _find_nearest(requested: Size, largest: Sequence[Size], model: ModelLimits) -> Size | None:
    """Return the largest size of the same shape that fits, with fewer frames if that is enough, else smaller ones."""
    height, width, frames = requested
    fewer = [(height, width, count) for count in range(model.frame_offset, frames, model.frame_step)]
    multiple = model.size_multiple
    smaller = [(_scale(height, share, multiple), _scale(width, share, multiple), frames) for share in range(1, 1000)]
    for sizes in (fewer, smaller):
        if fitting := [size for size in sizes if _fits(size, largest, model)]:
            return max(fitting, key=lambda size: _count_latent_pixels(size, model))
    return None


def _scale(side: int, share: int, multiple: int) -> int:
    """Return that many thousandths of a side, rounded down to a multiple."""
    return max(multiple, side * share // 1000 // multiple * multiple)
