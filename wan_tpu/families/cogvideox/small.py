"""Make small checkpoints with the structure of every CogVideoX model, from diffusers' and transformers' classes."""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from wan_tpu.families.cogvideox.published import PUBLISHED, TEXT_TOKENS
from wan_tpu.families.shared.tokenizer import train_tokenizer
from wan_tpu.families.shared.values import leave_out_later_keys, set_own_values

_TEXT_WIDTH = 32
_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "time_embed_dim": 16,
    "text_embed_dim": _TEXT_WIDTH,
    "num_layers": 2,
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 9,
}
_VAE: dict[str, Any] = {"block_out_channels": [8, 16, 16, 16], "layers_per_block": 1, "norm_num_groups": 4}
_TEXT_ENCODER: dict[str, Any] = {"d_model": _TEXT_WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

# Keys that diffusers added after the published files had been written, with their defaults.
_LATER: dict[str, dict[str, Any]] = {
    "transformer/config.json": {
        "use_rotary_positional_embeddings": False,
        "use_learned_positional_embeddings": False,
        "patch_bias": True,
        "patch_size_t": None,
        "ofs_embed_dim": None,
    },
    "vae/config.json": {"invert_scale_latents": False},
}


def make_checkpoint(
    folder: Path,
    kind: str,
    *,
    transformer: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a small checkpoint with the structure of a published model.

    Args:
        kind: The published model, one of `PUBLISHED`.
        transformer, vae: Override the small configuration.
    """
    published = PUBLISHED[kind]
    torch.manual_seed(seed)
    settings = published.transformer | _TRANSFORMER
    if settings["ofs_embed_dim"] is not None:
        settings["ofs_embed_dim"] = settings["time_embed_dim"]  # Both embeddings are added up.
    settings |= transformer or {}
    tokenizer = train_tokenizer()
    text = _TEXT_ENCODER | {"vocab_size": len(tokenizer), "d_model": settings["text_embed_dim"]}
    image_to_video = settings["in_channels"] > published.vae["latent_channels"]
    pipeline = diffusers.CogVideoXImageToVideoPipeline if image_to_video else diffusers.CogVideoXPipeline
    tokenizer.model_max_length = TEXT_TOKENS
    text_encoder = transformers.T5EncoderModel(transformers.T5Config(**(published.text_encoder | text)))
    blocks = {f"{side}_block_types": [f"CogVideoX{name}Block3D"] * 4 for side, name in (("down", "Down"), ("up", "Up"))}
    autoencoder = diffusers.AutoencoderKLCogVideoX.from_config(published.vae | _VAE | blocks | (vae or {}))
    expert = diffusers.CogVideoXTransformer3DModel.from_config(settings)
    pipeline(
        tokenizer=tokenizer,
        text_encoder=set_own_values(text_encoder, seed),
        vae=set_own_values(autoencoder, seed),
        transformer=set_own_values(expert, seed),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            beta_start=published.noise.beta_start,
            beta_end=published.noise.beta_end,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            snr_shift_scale=published.noise.snr_shift,
            rescale_betas_zero_snr=published.noise.zero_snr,
            timestep_spacing=published.noise.spacing,
        ),
    ).save_pretrained(folder)
    for file, later in _LATER.items():
        leave_out_later_keys(folder / file, later)
    return folder
