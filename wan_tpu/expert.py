"""The stages of a request, and who runs which of its steps: names and plain values, which import nothing."""

from dataclasses import dataclass

STAGES = ("encoder", "denoise_high", "denoise_low", "decoder")  # in the order in which a request runs through them
TOGETHER = ("denoise_high", "denoise_low")  # those that can run for several requests of equal shape at once


@dataclass(frozen=True)
class Expert:
    """A stretch of steps and the transformer that runs it; `stop` is the first step after it."""

    stage: str
    start: int
    stop: int
    guidance: float

    @property
    def guided(self) -> bool:
        """Whether it runs two branches: the prompt's and the negative prompt's."""
        return self.guidance > 1
