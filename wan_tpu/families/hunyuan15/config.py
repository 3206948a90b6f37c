"""What a HunyuanVideo-1.5 checkpoint says of itself, and whether this project runs it."""

from typing import Any

from wan_tpu.checkpoint import OWN, Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.hunyuan15.presets import HunyuanConfig
from wan_tpu.families.hunyuan15.sizes import OVERLAP, STRIDE

_CLASSES = {
    "vae": "AutoencoderKLHunyuanVideo15",
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "guider": "ClassifierFreeGuidance",
}
# With diffusers' defaults: what else there is has no published model.
_PLAIN_TRANSFORMER: dict[str, Any] = {"patch_size": 1, "patch_size_t": 1, "qk_norm": "rms_norm"}
_PLAIN_SCHEDULER: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
    "stochastic_sampling": False,
}
_PLAIN_GUIDER: dict[str, Any] = {
    "guidance_rescale": 0.0,
    "use_original_formulation": False,
    "start": 0.0,
    "stop": 1.0,
    "enabled": True,
}


def read_config(checkpoint: Checkpoint) -> HunyuanConfig:
    """Read a checkpoint's configuration; raises `CheckpointError` for what its pipelines don't run."""
    transformer = checkpoint.config("transformer")
    takes_image = transformer["task_type"] == "i2v"
    needed = ["tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2", "transformer", *_CLASSES]
    for component in [*needed, "image_encoder", "feature_extractor"] if takes_image else needed:
        if not checkpoint.has(component):
            raise CheckpointError(f"{checkpoint.source} has no {component}; give a complete checkpoint")
    for component, name in _CLASSES.items():
        if checkpoint.class_name(component) != name:
            raise CheckpointError(
                f"{checkpoint.source} has {component} {checkpoint.class_name(component)}; supported is {name}"
            )
    scheduler = checkpoint.config("scheduler", "scheduler_config.json")
    guider = checkpoint.config("guider", "guider_config.json")
    for what, config, plain in (
        ("transformer", transformer, _PLAIN_TRANSFORMER),
        ("scheduler", scheduler, _PLAIN_SCHEDULER),
        ("guider", guider, _PLAIN_GUIDER),
    ):
        for key, value in plain.items():
            if (config.get(key, value) or None) != (value or None):
                raise CheckpointError(f"{checkpoint.source} has {what} {key} {config[key]!r}; supported is {value!r}")
    return HunyuanConfig(
        transformer=transformer,
        vae=checkpoint.config("vae"),
        text_encoder=checkpoint.config("text_encoder"),
        glyph_encoder=checkpoint.config("text_encoder_2"),
        image_encoder=checkpoint.config("image_encoder") if takes_image else None,
        shift=float(scheduler.get("shift", 1.0)),
        guidance=float(guider.get("guidance_scale", 7.5)),
        vae_tile=_vae_tile(checkpoint),
    )


def _vae_tile(checkpoint: Checkpoint) -> int | None:
    found, unit = checkpoint.own("vae_tile").get("vae_tile"), STRIDE * OVERLAP
    if found is None or (type(found) is int and found > 0 and found % unit == 0):
        return found
    raise CheckpointError(
        f"{checkpoint.folder / OWN} has vae_tile {found!r}; it is a multiple of {unit} pixels, 256 as published"
    )
