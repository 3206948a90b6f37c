"""Reads a Helios checkpoint's configuration, and checks that this project runs it."""

from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.helios.published import TRANSFORMER, HeliosConfig, PyramidConfig
from wan_tpu.families.shared.settings import ENCODERS, check_components, check_supported, complete_config
from wan_tpu.families.wan.published import VAE_21

# Settings, other than sizes, that change what the transformer computes, with their supported values.
_TRANSFORMER = {
    "patch_size": [1, 2, 2],
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "added_kv_proj_dim": None,
    "guidance_cross_attn": True,
    "zero_history_timestep": True,
    "has_multi_term_memory_patch": True,
    "history_scale_mode": "per_head",
}
# The same of the schedulers; `_read_pyramid` reads the others.
_SCHEDULER: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "thresholding": False,
    "solver_order": 2,
    "predict_x0": True,
    "solver_type": "bh2",
    "lower_order_final": True,
    "disable_corrector": [],
    "solver_p": None,
}


def read_config(checkpoint: Checkpoint) -> HeliosConfig:
    """Read a checkpoint's configuration.

    Raises:
        CheckpointError: Helios pipelines, or this project, don't support the configuration.
    """
    check_components(checkpoint, ("tokenizer", "text_encoder", "transformer", "scheduler"), {"vae": "AutoencoderKLWan"})
    transformer = complete_config(checkpoint, "transformer", TRANSFORMER)
    check_supported(checkpoint, "transformer", transformer, _TRANSFORMER, {})
    _check_angles(checkpoint, transformer)
    pyramid = _read_pyramid(checkpoint)
    distilled = checkpoint.index.get("is_distilled") or False
    if distilled != (pyramid.solver == "dmd"):
        raise CheckpointError(
            f"{checkpoint.source} has is_distilled {distilled!r} but its scheduler is for the solver "
            f"{pyramid.solver}; only distilled models have HeliosDMDScheduler, and each of them has it"
        )
    text_encoder_class = checkpoint.class_name("text_encoder")
    return HeliosConfig(
        transformer=transformer,
        vae=complete_config(checkpoint, "vae", VAE_21),
        text_encoder=complete_config(checkpoint, "text_encoder", ENCODERS.get(text_encoder_class, {})),
        text_encoder_class=text_encoder_class,
        pyramid=pyramid,
        scaled_guidance=bool(checkpoint.index.get("is_cfg_zero_star") or False),
    )


def _check_angles(checkpoint: Checkpoint, transformer: dict[str, Any]) -> None:
    angles, width = transformer["rope_dim"], transformer["attention_head_dim"]
    if len(angles) != 3 or sum(angles) != width or any(size % 2 for size in angles):
        raise CheckpointError(
            f"{checkpoint.source} has rope_dim {angles!r} in transformer/config.json; it must be three even numbers "
            f"whose sum is the heads' width, {width}"
        )


def _read_pyramid(checkpoint: Checkpoint) -> PyramidConfig:
    """Return the settings of the checkpoint's scheduler."""
    config, defaults = checkpoint.config("scheduler", "scheduler_config.json"), PyramidConfig()
    name = config.get("_class_name")
    if name not in ("HeliosScheduler", "HeliosDMDScheduler"):
        raise CheckpointError(
            f"{checkpoint.source} has scheduler {name}; supported: HeliosScheduler and HeliosDMDScheduler"
        )
    check_supported(checkpoint, "scheduler", config, _SCHEDULER, {})
    distilled = name == "HeliosDMDScheduler"
    solver = "dmd" if distilled else config.get("scheduler_type", defaults.solver)
    shift_type = config.get("time_shift_type", "linear" if distilled else defaults.shift_type)
    stages, stage_range = config.get("stages", defaults.stages), config.get("stage_range", defaults.stage_range)
    if solver not in ("unipc", "euler", "dmd") or (solver == "dmd") != distilled:
        raise CheckpointError(f"{checkpoint.source} has scheduler_type {solver!r}; supported: 'unipc' and 'euler'")
    if shift_type not in ("exponential", "linear"):
        raise CheckpointError(
            f"{checkpoint.source} has time_shift_type {shift_type!r}; supported: exponential and linear"
        )
    if stages not in (1, 2, 3) or (stages > 1 and len(stage_range) != stages + 1):
        raise CheckpointError(
            f"{checkpoint.source} has {stages!r} stages and stage_range {stage_range!r}; supported: up to three "
            "stages, with a bound before, between and after them"
        )
    return PyramidConfig(
        stages=stages,
        stage_range=tuple(stage_range),
        gamma=float(config.get("gamma", defaults.gamma)),
        shift=float(config.get("shift", defaults.shift)),
        dynamic=bool(config.get("use_dynamic_shifting", defaults.dynamic)),
        shift_type=shift_type,
        # Pipelines read these four from the scheduler's file, though its class has no such settings.
        shift_tokens=(config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)),
        shifts=(config.get("base_shift", 0.5), config.get("max_shift", 1.15)),
        solver=solver,
    )
