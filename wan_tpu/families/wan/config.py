"""What a Wan checkpoint says of itself, and whether this project runs it."""

from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.wan.presets import WanConfig


def read_config(checkpoint: Checkpoint) -> WanConfig:
    """Read a checkpoint's configuration; raises `CheckpointError` for what Wan pipelines don't run."""
    index = checkpoint.index
    for component in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler"):
        if not checkpoint.has(component):
            raise CheckpointError(f"{checkpoint.source} has no {component}; give a complete Wan checkpoint")
    has_image_encoder = checkpoint.has("image_encoder")
    two_experts = checkpoint.has("transformer_2")
    if two_experts and index.get("boundary_ratio") is None:
        raise CheckpointError(f"{checkpoint.source} has two experts but no boundary_ratio in model_index.json")
    if two_experts and _shape(checkpoint.config("transformer_2")) != _shape(checkpoint.config("transformer")):
        raise CheckpointError(
            f"{checkpoint.source} has experts of different shapes: transformer/config.json and "
            "transformer_2/config.json must say the same"
        )
    _check_attention(checkpoint)
    boundary = index.get("boundary_ratio") if two_experts else None
    if boundary is not None and not (isinstance(boundary, int | float) and 0 < boundary < 1):
        raise CheckpointError(f"{checkpoint.source} has boundary_ratio {boundary!r}; it lies between 0 and 1")
    if checkpoint.class_name("vae") != "AutoencoderKLWan":
        raise CheckpointError(f"{checkpoint.source} has VAE {checkpoint.class_name('vae')}; Wan's is AutoencoderKLWan")
    return WanConfig(
        transformer=checkpoint.config("transformer"),
        vae=checkpoint.config("vae"),
        text_encoder=checkpoint.config("text_encoder"),
        image_encoder=checkpoint.config("image_encoder") if has_image_encoder else None,
        text_encoder_class=checkpoint.class_name("text_encoder"),
        image_encoder_class=checkpoint.class_name("image_encoder") if has_image_encoder else None,
        boundary_ratio=boundary,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        shift=_scheduler_shift(checkpoint),
    )


def _check_attention(checkpoint: Checkpoint) -> None:
    config = checkpoint.config("transformer")
    attention, kept = config.get("attention"), config.get("kept_blocks")
    if attention not in (None, "sla"):
        raise CheckpointError(
            f"{checkpoint.source} has attention {attention!r} in transformer/config.json; supported is 'sla', or none "
            "for attention to all keys"
        )
    if attention is not None and not (isinstance(kept, int | float) and 0 < kept <= 1):
        raise CheckpointError(
            f"{checkpoint.source} has kept_blocks {kept!r} in transformer/config.json; with sla it is a share of the "
            "blocks of keys, more than 0 and at most 1"
        )


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _scheduler_shift(checkpoint: Checkpoint) -> float:
    config = checkpoint.config("scheduler", "scheduler_config.json")
    name = config.get("_class_name")
    unipc = name == "UniPCMultistepScheduler" and config.get("use_flow_sigmas")
    if not unipc and name != "FlowMatchEulerDiscreteScheduler":
        raise CheckpointError(
            f"{checkpoint.source} has scheduler {name}; supported are UniPCMultistepScheduler with "
            "use_flow_sigmas and FlowMatchEulerDiscreteScheduler"
        )
    plain: dict[str, Any] = {
        "num_train_timesteps": 1000,
        "solver_order": 2,
        "solver_type": "bh2",
        "prediction_type": "flow_prediction",
        "predict_x0": True,
        "lower_order_final": True,
        "disable_corrector": [],
        "final_sigmas_type": "zero",
        "shift_terminal": None,
    }
    off = ["use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"]
    off += ["thresholding", "invert_sigmas", "stochastic_sampling"]
    plain |= dict.fromkeys(off, False)
    for key, value in plain.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{checkpoint.source} has scheduler {key} {config[key]!r}; supported is {value!r}")
    return float(config.get("flow_shift" if unipc else "shift", 1.0))
