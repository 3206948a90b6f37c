"""What a host of a slice is told, and what it tells: plain picklable values, which import neither JAX nor torch."""

import dataclasses
from collections.abc import Callable
from typing import Any

from wan_tpu.expert import Expert
from wan_tpu.request import ResolvedRequest

Report = Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """What a host runs; plain values.

    checkpoint   diffusers directory, the same path on every host, or hub id
    stages       of this pool, of `stages.STAGES`
    mesh         (dp, sp, tp) over all devices of the slice; what is None takes its default
    executables  folder of compiled programs to load in place of compiling; one that is trusted
    batch        requests of equal shape that are stepped at once at most: what is compiled ahead for experts
    """

    checkpoint: str
    stages: tuple[str, ...]
    mesh: tuple[int | None, int | None, int | None] | None = None
    dtype: str = "bfloat16"
    executables: str | None = None
    batch: int = 1


@dataclasses.dataclass(frozen=True)
class HostProgress:
    """Told while a method runs: `done` of `total` units; `doing` is a stage, or the component or program at hand."""

    doing: str
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a request takes, stage by stage: all that its driver needs to know.

    request  with nothing left open; experts and the decoder need no image, `without_image` leaves it out
    prompts  to encode: the prompt and, under guidance, the negative prompt
    experts  which stage runs which steps, in order; one with no step left out
    shapes   by stage, the name of the programs it needs (`StageHost.shapes`); requests of equal names can be stepped
             together
    """

    request: ResolvedRequest
    prompts: tuple[str, ...]
    experts: tuple[Expert, ...]
    shapes: dict[str, str]

    @property
    def without_image(self) -> ResolvedRequest:
        """The request as later stages need it."""
        return dataclasses.replace(self.request, image=None)

    def light(self) -> "Plan":
        """Return it without the image's pixels, 2.8 MB at 720p, as what comes after the encoder is told it."""
        return dataclasses.replace(self, request=self.without_image)


@dataclasses.dataclass(frozen=True)
class StepDone:
    """Facts of one finished step: the stage, how many of all steps are done, t in [0, 1000], its seconds."""

    stage: str
    step: int
    steps: int
    timestep: float
    seconds: float
