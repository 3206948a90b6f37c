"""What is let into the queue: requests of a size that the slices have memory for."""

from collections.abc import Sequence

from wan_tpu.errors import InvalidRequest
from wan_tpu.request import FRAME_STRIDE, SIZE_MULTIPLE, ResolvedRequest

Size = tuple[int, int, int]  # height, width, frames


def fits(size: Size, largest: Sequence[Size]) -> bool:
    """Whether one of the largest needs no less: tokens for the experts, pixels of a frame for the VAE."""
    return any(volume(size) <= volume(one) and frame(size) <= frame(one) for one in largest)


def volume(size: Size) -> int:
    """Return pixels over the latent frames: what the number of tokens grows with."""
    return frame(size) * ((size[2] - 1) // FRAME_STRIDE + 1)


def frame(size: Size) -> int:
    """Return the pixels of a frame."""
    return size[0] * size[1]


def check_size(request: ResolvedRequest, largest: Sequence[Size], step: int) -> None:
    """Raise `InvalidRequest` where an operator has said what fits the slices' memory, and this is larger.

    largest  sizes that fit; empty where anything does
    step     how many frames a video of the model may be longer than another
    """
    asked = height, width, frames = request.height, request.width, request.frames
    if not largest or fits(asked, largest):
        return
    found = _nearest(asked, largest, step)
    remedy = "no size does" if found is None else "the nearest that does is {1}x{0} with {2} frames".format(*found)
    raise InvalidRequest(
        f"{width}x{height} with {frames} frames is larger than what the operator of this service has said to fit the "
        f"memory of its slices; {remedy}",
        "size" if found is None or found[2] == frames else "frames",
    )


def _nearest(asked: Size, largest: Sequence[Size], step: int) -> Size | None:
    """Return the largest size of the asked shape that fits; with fewer frames, by so many, where these are too much."""
    height, width, frames = asked
    fewer = [(height, width, count) for count in range(1, frames, step)]
    smaller = [(_scaled(height, share), _scaled(width, share), frames) for share in range(1, 1000)]
    for sizes in (fewer, smaller):
        if fitting := [size for size in sizes if fits(size, largest)]:
            return max(fitting, key=volume)
    return None


def _scaled(side: int, share: int) -> int:
    """Return so many thousandths of a side, as a size that there is."""
    return max(SIZE_MULTIPLE, side * share // 1000 // SIZE_MULTIPLE * SIZE_MULTIPLE)
