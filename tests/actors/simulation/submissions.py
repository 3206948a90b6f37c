"""The requests of a simulated run: what is submitted when, and with which outcome."""

import asyncio
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from PIL import Image

from actors.engine import Fragment
from scripts.simulation.simulated import SimulatedSpec
from wan_tpu.families.wan.published import PUBLISHED
from wan_tpu.plan import RequestPlan
from wan_tpu.request import GenerationRequest, ResolvedRequest

if TYPE_CHECKING:
    from tests.actors.simulation.scenario import Driver


class OpenSpec(SimulatedSpec):
    """A model that chooses a video's length by its prompt, and whose decoder begins with noise."""

    chooses_length = True
    begins_decoder_with_noise = True

    def shorten(self, request: ResolvedRequest, seconds: float) -> ResolvedRequest:
        return dataclasses.replace(request, frames=self.nearest_frames(seconds * request.fps))


MODEL = OpenSpec(PUBLISHED["wan2.2-i2v-a14b"])
PICTURES = "image", "read image"  # Kinds of requests that begin with a picture.
CHUNKS = 3  # The number of chunks of a video that is denoised chunk by chunk.
UNGUIDED = "plain", "read image"
_PICTURE = Image.new("RGB", (8, 8))


@dataclasses.dataclass
class Submission:
    """A submitted request and its outcome."""

    id: str
    plan: RequestPlan
    priority: int
    at_s: float
    cancel_s: float | None = None
    video: bytes | None = None
    fragments: list[Fragment] | None = None  # None if nobody watches the video.
    failure: str | None = None
    ended: int = 0
    first_step_s: float | None = None
    is_orphaned: bool = False
    forgetting: asyncio.Task[None] | None = None
    driver: "Driver | None" = None


@functools.cache
def _plan(steps: int, kind: str) -> RequestPlan:
    options: dict[str, Any] = {"guidance_scale": 1.0, "guidance_scale_2": 1.0} if kind in UNGUIDED else {}
    options["frames"] = None if kind == "open" else 5
    request = GenerationRequest(prompt="p", height=64, width=64, steps=steps, shift=5.0, **options)
    plan = MODEL.plan(request, image=kind in PICTURES)
    if kind == "read image":
        plan = dataclasses.replace(plan, prompts=())
    if kind == "video":  # The first steps are skipped.
        first = steps // 3
        experts = [
            dataclasses.replace(each, start=max(first, each.start)) for each in plan.experts if each.stop > first
        ]
        plan = dataclasses.replace(plan, experts=tuple(experts), has_image=True)
        plan = dataclasses.replace(plan, request=dataclasses.replace(plan.request, video=__file__, strength=0.7))
    if kind == "chunks":  # Three chunks, each denoised by both stages.
        experts = [
            dataclasses.replace(each, start=each.start + chunk * steps, stop=each.stop + chunk * steps, chunk=chunk)
            for chunk in range(CHUNKS)
            for each in plan.experts
        ]
        plan = dataclasses.replace(plan, experts=tuple(experts), decoder_chunks=(1,) * CHUNKS)
        plan = dataclasses.replace(plan, request=dataclasses.replace(plan.request, steps=CHUNKS * steps))
    return plan


def plan_of(steps: int, kind: str, prompt: str, seed: int) -> RequestPlan:
    """Return the plan of a request: from text alone, perhaps of open length, with an image, of a video, or unguided.

    For a "read image", the text encoder embeds the prompt together with the image, and not the prompt alone.
    """
    plan = _plan(steps, kind)
    image: Any = _PICTURE if kind in PICTURES else None
    request = dataclasses.replace(plan.request, prompt=prompt, seed=seed, image=image)
    return dataclasses.replace(plan, request=request, prompts=(prompt, *plan.prompts[1:]) if plan.prompts else ())
