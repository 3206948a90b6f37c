"""What a CogVideoX checkpoint says of itself, and whether this project runs it."""

from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.cogvideox.presets import CogVideoXConfig
from wan_tpu.schedules.diffusion import SPACINGS, NoiseSchedule

_SOLVERS = {"CogVideoXDDIMScheduler": "ddim", "CogVideoXDPMScheduler": "dpm"}
_PLAIN: dict[str, Any] = {  # of a scheduler, with diffusers' default: what else there is has no published model
    "num_train_timesteps": 1000,
    "trained_betas": None,
    "steps_offset": 0,
}
_PLAIN_MODEL: dict[str, Any] = {
    "activation_fn": "gelu-approximate",
    "timestep_activation_fn": "silu",
    "attention_bias": True,
    "norm_elementwise_affine": True,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "temporal_compression_ratio": 4,
}


def read_config(checkpoint: Checkpoint) -> CogVideoXConfig:
    """Read a checkpoint's configuration; raises `CheckpointError` for what its pipelines don't run."""
    for component in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler"):
        if not checkpoint.has(component):
            raise CheckpointError(f"{checkpoint.source} has no {component}; give a complete CogVideoX checkpoint")
    if checkpoint.class_name("vae") != "AutoencoderKLCogVideoX":
        raise CheckpointError(
            f"{checkpoint.source} has VAE {checkpoint.class_name('vae')}; CogVideoX's is AutoencoderKLCogVideoX"
        )
    transformer = checkpoint.config("transformer")
    _check(checkpoint, "transformer", transformer, _PLAIN_MODEL)
    noise, solver = _noise(checkpoint)
    return CogVideoXConfig(
        transformer=transformer,
        vae=checkpoint.config("vae"),
        text_encoder=checkpoint.config("text_encoder"),
        text_encoder_class=checkpoint.class_name("text_encoder"),
        noise=noise,
        solver=solver,
    )


def _noise(checkpoint: Checkpoint) -> tuple[NoiseSchedule, str]:
    config = checkpoint.config("scheduler", "scheduler_config.json")
    name = config.get("_class_name")
    if name not in _SOLVERS:
        raise CheckpointError(
            f"{checkpoint.source} has scheduler {name}; supported are {' and '.join(sorted(_SOLVERS))}"
        )
    _check(checkpoint, "scheduler", config, _PLAIN)
    for key, value in (("prediction_type", "v_prediction"), ("beta_schedule", "scaled_linear")):
        if config.get(key) != value:
            raise CheckpointError(
                f"{checkpoint.source} has scheduler {key} {config.get(key)!r}; supported is {value!r}"
            )
    spacing = config.get("timestep_spacing", "leading")
    if spacing not in SPACINGS:
        raise CheckpointError(
            f"{checkpoint.source} has timestep_spacing {spacing!r}; supported are {', '.join(SPACINGS)}"
        )
    noise = NoiseSchedule(
        beta_start=float(config["beta_start"]),
        beta_end=float(config["beta_end"]),
        snr_shift=float(config.get("snr_shift_scale", 3.0)),
        zero_snr=bool(config.get("rescale_betas_zero_snr", False)),
        final_one=bool(config.get("set_alpha_to_one", True)),
        spacing=spacing,
    )
    return noise, _SOLVERS[name]


def _check(checkpoint: Checkpoint, what: str, config: dict[str, Any], plain: dict[str, Any]) -> None:
    for key, value in plain.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{checkpoint.source} has {what} {key} {config[key]!r}; supported is {value!r}")
