"""Video generation on TPUs: diffusion models as JAX programs.

from wan_tpu import GenerationRequest, load_pipeline
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wan_tpu.data import Conditioning, DenoiseState, Video
    from wan_tpu.errors import (
        CheckpointError,
        DoesNotFit,
        InvalidInput,
        InvalidRequest,
        MeshError,
        OutputError,
        Unavailable,
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
    "DoesNotFit",
    "GenerationRequest",
    "InvalidInput",
    "InvalidRequest",
    "MeshError",
    "OutputError",
    "Pipeline",
    "StepEvent",
    "Unavailable",
    "UnhealthyResult",
    "Video",
    "WanTpuError",
    "load_pipeline",
]

_MODULES = {
    "Conditioning": "data",
    "DenoiseState": "data",
    "GenerationRequest": "request",
    "Pipeline": "pipeline",
    "StepEvent": "stages",
    "Video": "data",
    "load_pipeline": "pipeline",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that code that only reads requests doesn't wait seconds for JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
