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
    """Settings that all pools of a pipeline share.

    Attributes:
        checkpoint: A diffusers directory, at the same path on every host, or a hub id.
        snapshots: The folder or bucket for states of unfinished requests. Every host must be able to reach it.
        dtype: The precision of weights and activations.
        executables: Where compiled programs are stored, or None.
        kernels: The kernels that every host uses (see `wan_tpu.switches`).
        collectives: How every host sends data between devices (see `wan_tpu.switches`).
        preview_decoder: The file of a tiny decoder for previews, at the same path on every host, or None.
        snapshot_every: Steps between two snapshots. When a slice is lost, the steps since the last one are repeated.
        scale_wait_s: The longest wait for a pool, estimated from the measured time of its stage, that autoscaling
            accepts before it adds a replica.
        scale_up_s: How long more replicas must have been needed before a pool gets them.
        scale_down_s: How long fewer replicas must have been needed before a pool loses some.
        scale_look_s: The period over which the needed number of replicas is averaged.
        warm_up: Requests whose programs every replica compiles before its first request: only sizes and presets matter.
        chips: What the slices are made of. Every figure and picture says so unless the chips are real.
        reliability: Time-outs and retries.
        host_class: The class that runs on every host of a slice, "module:name".
        name: The pipeline's name, which its applications and actors carry.
    """

    checkpoint: str
    snapshots: str
    dtype: str = "bfloat16"
    executables: str | None = None
    kernels: str = OWN_KERNELS
    collectives: str = OVERLAPPED
    preview_decoder: str | None = None
    snapshot_every: int = 5
    scale_wait_s: float = 60
    scale_up_s: float = 30
    scale_down_s: float = 600
    scale_look_s: float = 30
    warm_up: tuple[GenerationRequest, ...] = ()
    chips: Chips = "real"
    reliability: ReliabilitySettings = field(default_factory=ReliabilitySettings)
    host_class: str = "actors.slices.stage_host:StageHost"
    name: str = "wan-tpu"


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline: what runs where.

    Attributes:
        layout: The pools, and the slices of each.
        settings: What all pools share.
        model: The model of the checkpoint.
        lasting: Whether the pipeline stays up after the driver that brought it up has ended.
    """

    layout: Layout
    settings: PipelineSettings
    model: ModelSpec
    lasting: bool

    def __post_init__(self) -> None:
        self.layout.check_stages(self.model.stages)  # Raises `LayoutError`.

    def is_same_as(self, other: "PipelineSpec") -> bool:
        """Return whether another pipeline would make the same videos on the same slices."""
        return (self.layout.pools, self.settings) == (other.layout.pools, other.settings)
