"""Reads a CogVideoX checkpoint's configuration, and checks that this project runs it."""

from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.cogvideox.published import TRANSFORMER_2B, VAE_2B, CogVideoXConfig
from wan_tpu.families.shared.settings import ENCODERS, check_components, check_supported, complete_config
from wan_tpu.schedules.diffusion import SPACINGS, NoiseSchedule

_SOLVERS = {"CogVideoXDDIMScheduler": "ddim", "CogVideoXDPMScheduler": "dpm"}
# Defaults of both schedulers' settings that change their results.
SCHEDULER: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "trained_betas": None,
    "set_alpha_to_one": True,
    "steps_offset": 0,
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "rescale_betas_zero_snr": False,
    "snr_shift_scale": 3.0,
}
# Settings that are the same in all published models; others aren't supported.
_SAME_SCHEDULER = ("num_train_timesteps", "beta_schedule", "trained_betas", "steps_offset", "prediction_type")
_SAME_MODEL = (
    "activation_fn",
    "timestep_activation_fn",
    "attention_bias",
    "norm_elementwise_affine",
    "flip_sin_to_cos",
    "freq_shift",
    "temporal_compression_ratio",
)
# Sizes in latents of the two 1.5 models' earlier and current revision, whose weights are the same. They bound the
# positions that a video may have, which are numbered from 0 in both.
_EARLIER, _CURRENT = (96, 170), (300, 300)


def read_config(checkpoint: Checkpoint) -> CogVideoXConfig:
    """Read a checkpoint's configuration.

    Raises:
        CheckpointError: CogVideoX pipelines, or this project, don't support the configuration.
    """
    needed = ("tokenizer", "text_encoder", "transformer", "scheduler")
    check_components(checkpoint, needed, {"vae": "AutoencoderKLCogVideoX"})
    transformer = complete_config(checkpoint, "transformer", TRANSFORMER_2B)
    check_supported(checkpoint, "transformer", transformer, {key: TRANSFORMER_2B[key] for key in _SAME_MODEL}, {})
    if transformer["patch_size_t"] and (transformer["sample_height"], transformer["sample_width"]) == _EARLIER:
        transformer["sample_height"], transformer["sample_width"] = _CURRENT
    noise, solver = _read_scheduler(checkpoint)
    text_encoder_class = checkpoint.class_name("text_encoder")
    return CogVideoXConfig(
        transformer=transformer,
        vae=complete_config(checkpoint, "vae", VAE_2B),
        text_encoder=complete_config(checkpoint, "text_encoder", ENCODERS.get(text_encoder_class, {})),
        text_encoder_class=text_encoder_class,
        noise=noise,
        solver=solver,
    )


def _read_scheduler(checkpoint: Checkpoint) -> tuple[NoiseSchedule, str]:
    config = checkpoint.config("scheduler", "scheduler_config.json")
    name = config.get("_class_name")
    if name not in _SOLVERS:
        raise CheckpointError(f"{checkpoint.source} has scheduler {name}; supported: {' and '.join(sorted(_SOLVERS))}")
    same = {key: SCHEDULER[key] for key in _SAME_SCHEDULER}
    check_supported(checkpoint, "scheduler", config, same, {"prediction_type": "v_prediction"})
    config = SCHEDULER | config
    spacing = config["timestep_spacing"]
    if spacing not in list(SPACINGS):
        raise CheckpointError(f"{checkpoint.source} has timestep_spacing {spacing!r}; supported: {', '.join(SPACINGS)}")
    noise = NoiseSchedule(
        beta_start=float(config["beta_start"]),
        beta_end=float(config["beta_end"]),
        snr_shift=float(config["snr_shift_scale"]),
        zero_snr=bool(config["rescale_betas_zero_snr"]),
        final_one=bool(config["set_alpha_to_one"]),
        spacing=spacing,
    )
    return noise, _SOLVERS[name]
