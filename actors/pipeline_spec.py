"""A pipeline as it is, or is to be, brought up: plain values that everybody who runs or uses it is given."""

from dataclasses import dataclass, field
from typing import Literal

from cluster.gang.protocol import Timeouts
from cluster.layout import Layout
from wan_tpu.request import GenerationRequest
from wan_tpu.spec import ModelSpec
from wan_tpu.switches import OVERLAPPED, OWN

Chips = Literal["real", "emulated", "simulated"]


@dataclass(frozen=True)
class PipelineSettings:
    """What is the same for all pools.

    checkpoint      diffusers directory, the same path on every host, or hub id
    snapshots       folder or gs:// where states of unfinished requests are kept; every host must reach it
    kernels, collectives  `wan_tpu.switches`, on every host
    snapshot_every  steps between two snapshots; what a lost slice has done since is done again
    attempts        how often a stage is tried before its request fails, when slices or objects are lost
    scale_wait_s    how long requests may wait for a pool before autoscaling adds a replica, by the measured stage time
    scale_up_s, scale_down_s  how long a pool must want more, or fewer, replicas before it is given them; scale_look_s:
                    over how long what it wants is averaged
    warm_up         requests whose programs every replica compiles before it takes the first; only sizes matter
    chips           what the slices are: every figure and picture says so unless they are real
    host_class      what runs on every host of a slice, "module:name"
    name            of the pipeline: its applications and actors carry it
    """

    checkpoint: str
    snapshots: str
    dtype: str = "bfloat16"
    executables: str | None = None
    kernels: str = OWN
    collectives: str = OVERLAPPED
    snapshot_every: int = 5
    attempts: int = 5
    scale_wait_s: float = 60
    scale_up_s: float = 30
    scale_down_s: float = 600
    scale_look_s: float = 30
    warm_up: tuple[GenerationRequest, ...] = ()
    chips: Chips = "real"
    timeouts: Timeouts = field(default_factory=Timeouts)
    host_class: str = "actors.slices.stage_host:StageHost"
    name: str = "wan-tpu"


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
