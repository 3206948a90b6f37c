"""What is let into the queue: requests that this model can make, on these slices."""

import bisect
import dataclasses
from typing import Protocol

from PIL import Image

from actors.api.memory import Size, volume
from wan_tpu.errors import InvalidRequest, WanTpuError
from wan_tpu.request import FRAME_STRIDE, SIZE_MULTIPLE, Defaults, GenerationRequest, ResolvedRequest

_PLACEHOLDER = (SIZE_MULTIPLE, SIZE_MULTIPLE)  # pixels: what is made depends on whether there is an image
_KEPT = 1000  # answers of a planner
KNOWN = "model"  # the notice of what is known of the model: JSON of its tasks and defaults


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


class Room(Protocol):
    """Knows which sizes the slices have memory for; what is larger in anything needs no less."""

    def fits(self, size: Size) -> bool:
        """Whether (height, width, frames) fits."""


class FixedPlanner:
    """Knows a model's published settings and tasks, and nothing else of it."""

    def __init__(self, defaults: Defaults, tasks: tuple[str, ...] = ("t2v", "i2v")) -> None:
        self._defaults, self._tasks = defaults, tasks

    async def plan(self, request: GenerationRequest) -> ResolvedRequest:
        """Fill in what was left open."""
        if request.task not in self._tasks:
            does = f"this model does {' and '.join(self._tasks)} only"
            if request.image is None:
                raise InvalidRequest(f"image is missing, and {does}; give one")
            raise InvalidRequest(f"image was given, but {does}; leave it out")
        return request.resolve(self._defaults)


class Admission:
    """Checks requests, and remembers what the planner said: it needn't be there for what it has seen."""

    def __init__(self, planner: Planner, room: Room | None = None) -> None:
        """room: None where anything fits."""
        self._planner = planner
        self._room = room
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
        if self._room is None or self._room.fits(asked):
            return
        nearest = _nearest(asked, self._room)
        remedy = "no size does"
        if nearest is not None:
            height, width, frames = nearest
            remedy = f"the nearest that does is {width}x{height} with {frames} frames"
        raise Unsuitable(
            f"{request.width}x{request.height} with {request.frames} frames doesn't fit the memory of these slices, as "
            f"far as that is known; {remedy}",
            "size" if nearest is None or nearest[2] == request.frames else "num_frames",
        )


def _nearest(asked: Size, room: Room) -> Size | None:
    """Return the largest size of the asked shape that fits; with fewer frames where that is what is too much."""
    height, width, frames = asked
    fewer = [(height, width, count) for count in range(1, frames, FRAME_STRIDE)]
    smaller = [(_scaled(height, share), _scaled(width, share), frames) for share in range(1, 1000)]
    for sizes in (fewer, smaller):
        fitting = bisect.bisect_left(sizes, True, key=lambda size: not room.fits(size))
        if fitting:
            return max(sizes[:fitting], key=volume)
    return None


def _scaled(side: int, share: int) -> int:
    """Return so many thousandths of a side, as a size that there is."""
    return max(SIZE_MULTIPLE, side * share // 1000 // SIZE_MULTIPLE * SIZE_MULTIPLE)
