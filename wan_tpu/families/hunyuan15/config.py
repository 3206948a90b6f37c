"""Reads a HunyuanVideo-1.5 checkpoint's configuration, and checks that this project runs it."""

from typing import Any

from wan_tpu.checkpoint import SETTINGS, Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.hunyuan15.published import TRANSFORMER, VAE, HunyuanConfig
from wan_tpu.families.hunyuan15.sizes import OVERLAP, STRIDE
from wan_tpu.families.shared.settings import (
    ENCODERS,
    FLOW_MATCH_EULER,
    check_components,
    check_supported,
    complete_config,
)

_CLASSES = {
    "vae": "AutoencoderKLHunyuanVideo15",
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "guider": "ClassifierFreeGuidance",
}
# Defaults of settings that change results; no published model has other values.
GUIDER: dict[str, Any] = {
    "guidance_rescale": 0.0,
    "use_original_formulation": False,
    "start": 0.0,
    "stop": 1.0,
    "enabled": True,
}
_SAME_TRANSFORMER = ("patch_size", "patch_size_t", "qk_norm")


def read_config(checkpoint: Checkpoint) -> HunyuanConfig:
    """Read a checkpoint's configuration.

    Raises:
        CheckpointError: HunyuanVideo-1.5 pipelines, or this project, don't support the configuration.
    """
    needed = ("transformer", "tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    check_components(checkpoint, needed, _CLASSES)
    transformer = complete_config(checkpoint, "transformer", TRANSFORMER)
    if transformer["task_type"] not in ("t2v", "i2v"):
        raise CheckpointError(f"{checkpoint.source} has task_type {transformer['task_type']!r}; supported: t2v and i2v")
    takes_image = transformer["task_type"] == "i2v"
    check_components(checkpoint, ("image_encoder", "feature_extractor") if takes_image else (), {})
    scheduler = checkpoint.config("scheduler", "scheduler_config.json")
    guider = checkpoint.config("guider", "guider_config.json")
    same = {key: TRANSFORMER[key] for key in _SAME_TRANSFORMER}
    check_supported(checkpoint, "transformer", transformer, same, {})
    check_supported(checkpoint, "scheduler", scheduler, FLOW_MATCH_EULER, {})
    check_supported(checkpoint, "guider", guider, GUIDER, {})
    return HunyuanConfig(
        transformer=transformer,
        vae=complete_config(checkpoint, "vae", VAE),
        text_encoder=complete_config(checkpoint, "text_encoder", ENCODERS["Qwen2_5_VLTextModel"]),
        glyph_encoder=complete_config(checkpoint, "text_encoder_2", ENCODERS["T5EncoderModel"]),
        image_encoder=(
            complete_config(checkpoint, "image_encoder", ENCODERS["SiglipVisionModel"]) if takes_image else None
        ),
        shift=float(scheduler.get("shift", 1.0)),
        guidance=float(guider.get("guidance_scale", 7.5)),
        vae_tile=_read_vae_tile(checkpoint),
    )


def _read_vae_tile(checkpoint: Checkpoint) -> int | None:
    tile, unit = checkpoint.read_settings("vae_tile").get("vae_tile"), STRIDE * OVERLAP
    if tile is None or (type(tile) is int and tile > 0 and tile % unit == 0):
        return tile
    raise CheckpointError(
        f"{checkpoint.folder / SETTINGS} has vae_tile {tile!r}; it must be a multiple of {unit} pixels (published: 256)"
    )
