"""What is let into the queue: requests that this model can make, of a size that the slices have memory for."""

from collections.abc import Sequence

from wan_tpu.errors import InvalidRequest
from wan_tpu.request import FRAME_STRIDE, SIZE_MULTIPLE, GenerationRequest, ResolvedRequest
from wan_tpu.spec import ModelSpec

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


def admit(
    request: GenerationRequest,
    spec: ModelSpec,
    largest: Sequence[Size],
    *,
    image: bool = False,
    last: bool = False,
    picture: tuple[int, int] | None = None,
) -> ResolvedRequest:
    """Return a request with nothing left open; raises `InvalidRequest`.

    largest  sizes that fit the slices' memory, as an operator has said; empty where anything fits
    image, last  whether there is a first, a last frame, neither of which is looked at before all else is fine
    picture      then the first one's (height, width)
    """
    resolved = spec.plan(request, image=image, last=last, picture=picture).request
    asked = (resolved.height, resolved.width, resolved.frames)
    if largest and not fits(asked, largest):
        raise _too_large(asked, largest, spec.frame_step)
    return resolved


def _too_large(asked: Size, largest: Sequence[Size], step: int) -> InvalidRequest:
    height, width, frames = asked
    found = _nearest(asked, largest, step)
    remedy = "no size does" if found is None else "the nearest that does is {1}x{0} with {2} frames".format(*found)
    return InvalidRequest(
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
