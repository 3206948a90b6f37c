"""A pipeline as it is, or is to be, brought up: one value that everybody who uses it is given."""

from dataclasses import dataclass

from actors.slices.settings import PipelineSettings
from cluster.layout import Layout
from wan_tpu.spec import ModelSpec


@dataclass(frozen=True)
class PipelineSpec:
    """What runs where.

    lasting  whether it stays when the driver that brought it up ends
    """

    layout: Layout
    settings: PipelineSettings
    model: ModelSpec
    lasting: bool

    def __post_init__(self) -> None:
        self.layout.check_stages(self.model.stages)  # raises LayoutError

    def same_as(self, other: "PipelineSpec") -> bool:
        """Whether the other would make the same videos on the same slices."""
        return (self.layout.pools, self.settings) == (other.layout.pools, other.settings)
