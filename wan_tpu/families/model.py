"""A family's model: its components and the functions of its stages, in JAX."""

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families import spec_of
from wan_tpu.families.wan.model import WanModel

Model = WanModel  # the union of the families' model classes


def open_model(checkpoint: Checkpoint) -> Model:
    """Return the model of a checkpoint; raises `CheckpointError` when no family knows it."""
    return WanModel(spec_of(checkpoint), checkpoint)
