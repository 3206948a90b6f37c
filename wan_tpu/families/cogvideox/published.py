"""The published CogVideoX models: configurations, which suffice to compile them, and sampling settings.

Sources: the config.json files of the THUDM/CogVideoX* repositories on the Hugging Face hub, google/t5-v1_1-xxl for the
encoder; sampling settings from inference/cli_demo.py of github.com/THUDM/CogVideo at e519eced, and from the models'
cards the length and frame rate of 1.0, for which that program has those of 1.5.
"""

from dataclasses import dataclass, replace
from typing import Any

from wan_tpu.request import Defaults
from wan_tpu.schedules.diffusion import NoiseSchedule

TEXT_TOKENS = 226  # Tokens of every prompt, padding included and not masked: a constant of the pipelines.

CUSTOM = "a custom CogVideoX"


@dataclass(frozen=True)
class CogVideoXConfig:
    """The configuration of a CogVideoX model, from a checkpoint or as published."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]
    text_encoder_class: str
    noise: NoiseSchedule  # How much noise it was trained with.
    solver: str  # Its scheduler, "ddim" or "dpm".

    @property
    def frames_a_patch(self) -> int:
        """Latent frames that one token covers."""
        return self.transformer["patch_size_t"] or 1


# The first transformer's and VAE's values are also the defaults of diffusers' classes, for keys that a file lacks.
# fmt: off
TRANSFORMER_2B: dict[str, Any] = {
    "num_attention_heads": 30, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16, "flip_sin_to_cos": True,
    "freq_shift": 0, "dropout": 0.0, "time_embed_dim": 512, "ofs_embed_dim": None, "text_embed_dim": 4096,
    "num_layers": 30, "attention_bias": True, "sample_width": 90, "sample_height": 60, "sample_frames": 49,
    "patch_size": 2, "patch_size_t": None, "temporal_compression_ratio": 4, "max_text_seq_length": TEXT_TOKENS,
    "activation_fn": "gelu-approximate", "timestep_activation_fn": "silu", "norm_elementwise_affine": True,
    "norm_eps": 1e-5, "spatial_interpolation_scale": 1.875, "temporal_interpolation_scale": 1.0,
    "use_rotary_positional_embeddings": False, "use_learned_positional_embeddings": False, "patch_bias": True,
}
TRANSFORMER_5B = TRANSFORMER_2B | {
    "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True,
}
TRANSFORMER_5B_I2V = TRANSFORMER_5B | {"in_channels": 32, "use_learned_positional_embeddings": True}
TRANSFORMER_15 = TRANSFORMER_5B | {
    "patch_size_t": 2, "patch_bias": False, "sample_width": 300, "sample_height": 300, "sample_frames": 81,
}
TRANSFORMER_15_I2V = TRANSFORMER_15 | {"in_channels": 32, "ofs_embed_dim": 512}

VAE_2B: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "down_block_types": ["CogVideoXDownBlock3D"] * 4,
    "up_block_types": ["CogVideoXUpBlock3D"] * 4, "sample_height": 480, "sample_width": 720, "shift_factor": None,
    "latents_mean": None, "latents_std": None, "force_upcast": True, "latent_channels": 16,
    "block_out_channels": [128, 256, 256, 512], "layers_per_block": 3, "act_fn": "silu", "norm_eps": 1e-6,
    "norm_num_groups": 32, "temporal_compression_ratio": 4,
    "scaling_factor": 1.15258426, "use_quant_conv": False, "use_post_quant_conv": False, "invert_scale_latents": False,
}
VAE_5B = VAE_2B | {"scaling_factor": 0.7}
VAE_15_I2V = VAE_5B | {"invert_scale_latents": True}
T5_XXL: dict[str, Any] = {
    "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "feed_forward_proj": "gated-gelu",
    "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1,
}
# fmt: on


def _configuration(transformer: dict[str, Any], vae: dict[str, Any], snr_shift: float) -> CogVideoXConfig:
    noise = NoiseSchedule(snr_shift=snr_shift, zero_snr=True, spacing="trailing")
    return CogVideoXConfig(transformer, vae, T5_XXL, "T5EncoderModel", noise, "ddim")


PUBLISHED: dict[str, CogVideoXConfig] = {
    "cogvideox-2b": _configuration(TRANSFORMER_2B, VAE_2B, 3.0),
    "cogvideox-5b": _configuration(TRANSFORMER_5B, VAE_5B, 1.0),
    "cogvideox-5b-i2v": _configuration(TRANSFORMER_5B_I2V, VAE_5B, 1.0),
    "cogvideox1.5-5b": _configuration(TRANSFORMER_15, VAE_5B, 1.0),
    "cogvideox1.5-5b-i2v": _configuration(TRANSFORMER_15_I2V, VAE_15_I2V, 1.0),
}
HUB_IDS: dict[str, str] = {
    "cogvideox-2b": "THUDM/CogVideoX-2b",
    "cogvideox-5b": "THUDM/CogVideoX-5b",
    "cogvideox-5b-i2v": "THUDM/CogVideoX-5b-I2V",
    "cogvideox1.5-5b": "zai-org/CogVideoX1.5-5B",
    "cogvideox1.5-5b-i2v": "zai-org/CogVideoX1.5-5B-I2V",
}


def recognise(config: CogVideoXConfig) -> str:
    for name, published in PUBLISHED.items():
        if all(config.transformer[key] == value for key, value in published.transformer.items()):
            return name
    return CUSTOM


def defaults(config: CogVideoXConfig) -> Defaults:
    """Return the settings of the authors' program, by the model's generation, 1.0 or 1.5.

    Its solver is DPM with `use_dynamic_cfg`, whatever the checkpoint's scheduler.
    """
    newer = config.frames_a_patch > 1
    height, width, frames, fps = (768, 1360, 81, 16) if newer else (480, 720, 49, 8)
    return Defaults(
        height=height,
        width=width,
        frames=frames,
        fps=fps,
        steps=50,
        guidance_scale=6.0,
        guidance_scale_2=6.0,
        shift=1.0,
        solver="dpm",
    )


def diffusers_defaults(config: CogVideoXConfig) -> Defaults:
    """Return the defaults of diffusers' pipelines, with the checkpoint's scheduler; from an image, 49 frames."""
    settings = replace(defaults(config), solver=config.solver)
    from_image = config.transformer["in_channels"] > config.vae["latent_channels"]
    return replace(settings, frames=49) if from_image else settings


def source(config: CogVideoXConfig) -> str:
    return "https://github.com/THUDM/CogVideo/blob/e519eced/inference/cli_demo.py"
