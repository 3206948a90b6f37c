"""Admit only requests of a size that fits the slices' memory."""

from collections.abc import Sequence

from wan_tpu.errors import InvalidRequest
from wan_tpu.request import FRAME_STRIDE, SIZE_MULTIPLE, ResolvedRequest

Size = tuple[int, int, int]  # Height, width and number of frames.


def fits(size: Size, largest: Sequence[Size]) -> bool:
    """Return whether a size has at most the tokens (for experts) and pixels a frame (for the VAE) of a largest one."""
    return any(
        count_latent_pixels(size) <= count_latent_pixels(size_limit)
        and count_frame_pixels(size) <= count_frame_pixels(size_limit)
        for size_limit in largest
    )


def count_latent_pixels(size: Size) -> int:
    """Return the pixels of all latent frames, which the number of tokens is proportional to."""
    return count_frame_pixels(size) * ((size[2] - 1) // FRAME_STRIDE + 1)


def count_frame_pixels(size: Size) -> int:
    """Return the pixels of a frame."""
    return size[0] * size[1]


def check_size(request: ResolvedRequest, largest: Sequence[Size], step: int) -> None:
    """Raise `InvalidRequest` if a request is larger than what the operator says fits the slices' memory.

    Args:
        request: The request.
        largest: Sizes that fit; if empty, any size does.
        step: Numbers of frames that the model makes differ by this.
    """
    asked = height, width, frames = request.height, request.width, request.frames
    if not largest or fits(asked, largest):
        return
    nearest = _find_nearest(asked, largest, step)
    remedy = "no size does" if nearest is None else "the nearest that does is {1}x{0} with {2} frames".format(*nearest)
    raise InvalidRequest(
        f"{width}x{height} with {frames} frames is larger than what the operator of this service has said to fit the "
        f"memory of its slices; {remedy}",
        "size" if nearest is None or nearest[2] == frames else "frames",
    )


def _find_nearest(asked: Size, largest: Sequence[Size], step: int) -> Size | None:
    """Return the largest size of the same shape that fits, with fewer frames if that is enough, else smaller ones."""
    height, width, frames = asked
    fewer = [(height, width, count) for count in range(1, frames, step)]
    smaller = [(_scale(height, share), _scale(width, share), frames) for share in range(1, 1000)]
    for sizes in (fewer, smaller):
        if fitting := [size for size in sizes if fits(size, largest)]:
            return max(fitting, key=count_latent_pixels)
    return None


def _scale(side: int, share: int) -> int:
    """Return so many thousandths of a side, rounded down to a valid size."""
    return max(SIZE_MULTIPLE, side * share // 1000 // SIZE_MULTIPLE * SIZE_MULTIPLE)
