"""Where the seconds of a video go: a plan's seconds by cause, beside what the chip's limits would allow."""

from collections.abc import Callable
from dataclasses import dataclass

from wan_tpu.plan import DECODER, ENCODER
from wan_tpu.pricing.cost import CATEGORIES, ZERO, Times
from wan_tpu.pricing.host import DENOISE
from wan_tpu.pricing.plan import ProgramPlan, SlicePlan, find_owner

# What a step's seconds are called here, and what usually shortens them.
_OF_STEPS = {
    "matmul": ("matrix products", "8-bit weights: --precision int8 or float8, whichever the chip multiplies"),
    "convolution": ("convolutions", "more chips"),
    "attention": ("attention", "a preset with sparse attention or fewer steps, where the model has one"),
    "vector": ("vector work", "more chips"),
    "copies": ("copies", "another mesh: --meshes"),
    "collectives": ("exposed transfers", "another mesh: --meshes"),
}
HOST = "host"
_TEXT, _IMAGES, _DECODER, _SOUND = "text", "images", "decoder", "sound"
_HELP = {
    _TEXT: "a pool for the encoder, which works on the next request meanwhile",
    _IMAGES: "a pool for the encoder, which works on the next request meanwhile",
    _DECODER: "a pool for the decoder, which works on the previous request meanwhile",
    _SOUND: "a pool for the decoder, which works on the previous request meanwhile",
    HOST: "a machine with faster cores",
}
CAUSES = (_TEXT, _IMAGES, *(name for name, _ in _OF_STEPS.values()), _DECODER, _SOUND, HOST)


@dataclass(frozen=True)
class Cause:
    """The seconds of a video that one kind of work takes."""

    name: str
    seconds: float  # Predicted, by the estimate.
    # What the chip's limits allow: products at the matrix units' peak or bytes at the memory's bandwidth, whichever
    # takes longer, with all transfers hidden. The host has no such limit.
    limit: float
    help: str  # What usually shortens it.

    @property
    def gain(self) -> float:
        """The seconds above the limit."""
        return self.seconds - self.limit


def list_causes(plan: SlicePlan) -> list[Cause]:
    """Return what a video's seconds are spent on, in the order of the work, without what takes none.

    Programs that couldn't be compiled are missing.
    """
    times = dict.fromkeys(CAUSES, ZERO)
    for stage in plan.stages:
        for program in stage.programs:
            if program.optimistic is None:
                continue
            if stage.name == DENOISE:
                for category in CATEGORIES:
                    times[_OF_STEPS[category][0]] += program.optimistic.by_category[category] * program.calls
            else:
                times[_NAMES[stage.name](program)] += program.optimistic.total * program.calls
    host_s = sum(stage.host_s for stage in plan.stages)
    times[HOST] = Times(host_s, host_s, host_s)
    helps = _HELP | dict(_OF_STEPS.values())
    return [Cause(name, spent.estimate, spent.limit, helps[name]) for name, spent in times.items() if spent.estimate]


def largest_gains(causes: list[Cause], count: int = 3) -> list[Cause]:
    """Return the causes that are furthest above the chip's limits, the largest first."""
    return sorted((cause for cause in causes if cause.gain > 0), key=lambda cause: -cause.gain)[:count]


_NAMES: dict[str, Callable[[ProgramPlan], str]] = {
    ENCODER: lambda program: _TEXT if program.name.startswith("text_encoder") else _IMAGES,
    DECODER: lambda program: _DECODER if find_owner(program) == DECODER else _SOUND,
}
