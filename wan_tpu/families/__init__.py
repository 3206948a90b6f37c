"""Model families: one file each, found by the transformer class that a checkpoint names."""

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.wan import WanModel
from wan_tpu.families.wan_config import read_config

Model = WanModel  # the union of the families' model classes


def open_model(checkpoint: Checkpoint) -> Model:
    """Return the model of a checkpoint; raises `CheckpointError` when no family knows it."""
    found = checkpoint.class_name("transformer") if checkpoint.has("transformer") else "no transformer"
    if found != "WanTransformer3DModel":
        raise CheckpointError(
            f"{checkpoint.source} is a {checkpoint.index.get('_class_name')} with {found}; "
            "supported are Wan 2.1 and 2.2 (WanTransformer3DModel), for example Wan-AI/Wan2.2-I2V-A14B-Diffusers"
        )
    try:
        return WanModel(read_config(checkpoint), checkpoint)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.source} has a damaged configuration ({type(error).__name__}: {error}); fetch it again"
        ) from error
