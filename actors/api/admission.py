"""What is let into the queue: requests that this model can make, on these slices."""

import dataclasses
import math
from typing import Protocol

from PIL import Image

from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.request import FRAME_STRIDE, SIZE_MULTIPLE, Defaults, GenerationRequest, ResolvedRequest

_PLACEHOLDER = (SIZE_MULTIPLE, SIZE_MULTIPLE)  # pixels: what is made depends on whether there is an image
_KEPT = 1000  # answers of a planner

Size = tuple[int, int, int]


class NotReady(WanTpuError):
    """Nothing is known of the model yet; it is worth trying again."""


class Unsuitable(InvalidRequest):
    """The model or its slices can't make this; `param` is the field to change, where it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Planner(Protocol):
    """Knows what the model can make."""

    async def plan(self, request: GenerationRequest) -> ResolvedRequest:
        """Return a request with nothing left open; raises `InvalidRequest`, `NotReady`."""


class FixedPlanner:
    """Knows a model's published settings and tasks, and nothing else of it."""

    def __init__(self, defaults: Defaults, tasks: tuple[str, ...] = ("t2v", "i2v")) -> None:
        self._defaults, self._tasks = defaults, tasks

    async def plan(self, request: GenerationRequest) -> ResolvedRequest:
        """Fill in what was left open."""
        if request.task not in self._tasks:
            remedy = "give input_reference" if request.image is None else "leave input_reference out"
            raise Unsuitable(f"this model does {' and '.join(self._tasks)} only; {remedy}", "input_reference")
        return request.resolve(self._defaults)


class Admission:
    """Checks requests, and remembers what the planner said: it needn't be there for what it has seen."""

    def __init__(self, planner: Planner, largest: tuple[Size, ...] = ()) -> None:
        """largest: (height, width, frames) that fit; anything if empty."""
        self._planner = planner
        self._largest = largest
        self._known: dict[tuple[object, ...], ResolvedRequest] = {}

    async def fps(self) -> float:
        """Return the model's frames per second; raises `NotReady`."""
        for image in (False, True):
            try:
                return (await self._plan(GenerationRequest(), image=image)).fps
            except InvalidRequest as refused:  # a model that needs an image
                last = refused
        raise last

    async def check(self, request: GenerationRequest, *, image: bool) -> ResolvedRequest:
        """Return a request with nothing left open, but for its image; raises `InvalidRequest`, `NotReady`."""
        planned = await self._plan(request, image=image)
        given = {name: getattr(request, name) for name in ("prompt", "seed")}
        if request.negative_prompt is not None:
            given["negative_prompt"] = request.negative_prompt
        resolved = dataclasses.replace(planned, image=None, **given)
        self._check_fits(resolved)
        return resolved

    async def _plan(self, request: GenerationRequest, *, image: bool) -> ResolvedRequest:
        """Plan without what differs from job to job."""
        fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
        fields |= {"prompt": "", "negative_prompt": None, "seed": 0, "image": None}
        key = (image, *fields.values())
        if key not in self._known:
            if image:
                fields["image"] = Image.new("RGB", _PLACEHOLDER)
            planned = await self._planner.plan(GenerationRequest(**fields))
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = planned
        return self._known[key]

    def _check_fits(self, request: ResolvedRequest) -> None:
        asked = (request.height, request.width, request.frames)
        if not self._largest or any(_fits(asked, size) for size in self._largest):
            return
        height, width, frames = max((_nearest(asked, size) for size in self._largest), key=_volume)
        raise Unsuitable(
            f"{request.width}x{request.height} with {request.frames} frames doesn't fit the memory of these slices; "
            f"the nearest that does is {width}x{height} with {frames} frames",
            "size" if frames == request.frames else "num_frames",
        )


def _fits(asked: Size, size: Size) -> bool:
    """Whether one size needs no more than another: tokens for the experts, pixels of a frame for the VAE."""
    return _volume(asked) <= _volume(size) and asked[0] * asked[1] <= size[0] * size[1]


def _volume(size: Size) -> int:
    """Pixels over the latent frames: what the number of tokens grows with."""
    height, width, frames = size
    return height * width * ((frames - 1) // FRAME_STRIDE + 1)


def _nearest(asked: Size, size: Size) -> Size:
    """Return the largest size of the asked shape that fits; with fewer frames where that is what is too much."""
    height, width, frames = asked
    if height * width <= size[0] * size[1]:
        latent = _volume(size) // (height * width)
        return height, width, (latent - 1) * FRAME_STRIDE + 1
    shape = math.sqrt(min(size[0] * size[1], _volume(size) / ((frames - 1) // FRAME_STRIDE + 1)) / (height * width))
    tall, wide = (max(SIZE_MULTIPLE, int(side * shape) // SIZE_MULTIPLE * SIZE_MULTIPLE) for side in (height, width))
    return tall, wide, frames
