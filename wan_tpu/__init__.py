"""Video generation on TPUs: Wan 2.1 and 2.2 as JAX programs.

from wan_tpu import GenerationRequest, load_pipeline
"""

from wan_tpu.data import Conditioning, DenoiseState, Video
from wan_tpu.errors import (
    CheckpointError,
    InvalidInput,
    InvalidRequest,
    MeshError,
    OutputError,
    UnhealthyResult,
    WanTpuError,
)
from wan_tpu.pipeline import Pipeline, load_pipeline
from wan_tpu.request import GenerationRequest
from wan_tpu.stages import StepEvent

__all__ = [
    "CheckpointError",
    "Conditioning",
    "DenoiseState",
    "GenerationRequest",
    "InvalidInput",
    "InvalidRequest",
    "MeshError",
    "OutputError",
    "Pipeline",
    "StepEvent",
    "UnhealthyResult",
    "Video",
    "WanTpuError",
    "load_pipeline",
]
