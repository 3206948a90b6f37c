"""Model families, a folder each, found by the transformer class that a checkpoint names. This file needs no JAX."""

from pathlib import Path

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.wan.presets import PRESETS
from wan_tpu.families.wan.spec import WanSpec
from wan_tpu.spec import ModelSpec

_SPECS: dict[str, type[WanSpec]] = {"WanTransformer3DModel": WanSpec}  # by transformer class


def open_spec(source: str | Path) -> ModelSpec:
    """Return the spec of a diffusers directory or hub id; raises `CheckpointError` when no family knows it.

    Only configurations are read.
    """
    return spec_of(Checkpoint(source))


def spec_of(checkpoint: Checkpoint) -> WanSpec:
    """Return the spec of an opened checkpoint; raises `CheckpointError`."""
    found = checkpoint.class_name("transformer") if checkpoint.has("transformer") else "no transformer"
    if found not in _SPECS:
        raise CheckpointError(
            f"{checkpoint.source} is a {checkpoint.index.get('_class_name')} with {found}; "
            "supported are Wan 2.1 and 2.2 (WanTransformer3DModel), for example Wan-AI/Wan2.2-I2V-A14B-Diffusers"
        )
    try:
        return _SPECS[found].open(checkpoint)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.source} has a damaged configuration ({type(error).__name__}: {error}); fetch it again"
        ) from error


def preset_spec(name: str) -> WanSpec:
    """Return the spec of a published model, one of `PRESETS`."""
    return WanSpec(PRESETS[name])
