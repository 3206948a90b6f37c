"""The specification of a pipeline: plain values for everything that brings it up or uses it."""

from dataclasses import dataclass, field
from typing import Literal

from actors.reliability import ReliabilitySettings
from cluster.layout import Layout
from wan_tpu.request import GenerationRequest
from wan_tpu.spec import ModelSpec
from wan_tpu.switches import OVERLAPPED, OWN_KERNELS

Chips = Literal["real", "emulated", "simulated"]


@dataclass(frozen=True)
class PipelineSettings:
    """Settings that all pools of a pipeline share."""

    checkpoint: str  # A diffusers directory, at the same path on every host, or a hub id.
    snapshots: str  # The folder or bucket for states of unfinished requests. Every host must be able to reach it.
    dtype: str = "bfloat16"
    executables: str | None = None  # Where compiled programs are stored, or None.
    kernels: str = OWN_KERNELS  # The kernels that every host uses (see `wan_tpu.switches`).
    collectives: str = OVERLAPPED  # How every host sends data between devices (see `wan_tpu.switches`).
    # The file of a tiny decoder for previews, at the same path on every host, or None.
    preview_decoder: str | None = None
    # Steps between two snapshots. When a slice is lost, the steps since the last one are repeated.
    snapshot_every: int = 5
    # The longest wait for a pool, estimated from the measured time of its stage, that autoscaling accepts before it
    # adds a replica.
    scale_wait_s: float = 60
    scale_up_s: float = 30  # How long more replicas must have been needed before a pool gets them.
    scale_down_s: float = 600  # How long fewer replicas must have been needed before a pool loses some.
    scale_look_s: float = 30  # The period over which the needed number of replicas is averaged.
    # Requests whose programs every replica compiles before its first request: only sizes and presets matter.
    warm_up: tuple[GenerationRequest, ...] = ()
    chips: Chips = "real"  # What the slices are made of. Every figure and picture says so unless the chips are real.
    reliability: ReliabilitySettings = field(default_factory=ReliabilitySettings)
    # The class that runs on every host of a slice, "module:name".
    host_class: str = "actors.slices.stage_host:StageHost"
    name: str = "wan-tpu"  # The pipeline's name, which its applications and actors carry.


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline: what runs where."""

    layout: Layout  # The pools, and the slices of each.
    settings: PipelineSettings
    model: ModelSpec
    lasting: bool  # Whether the pipeline stays up after the driver that brought it up has ended.

    def __post_init__(self) -> None:
        self.layout.check_stages(tuple(self.model.components), self.model.optional_stages)  # Raises `LayoutError`.
        object.__setattr__(self, "model", self.model.limit_to(self.layout.stages))

    def is_same_as(self, other: "PipelineSpec") -> bool:
        """Return whether another pipeline would make the same videos on the same slices."""
        return (self.layout.pools, self.settings) == (other.layout.pools, other.settings)
