"""Make small checkpoints with the structure of every Wan model, from diffusers' and transformers' own classes."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from wan_tpu.families.shared.tokenizer import train_tokenizer
from wan_tpu.families.shared.values import leave_out_later_keys, set_own_values
from wan_tpu.families.wan.components import SPARSE, build_expert
from wan_tpu.families.wan.published import PUBLISHED, VAE_21, VAE_22, WanConfig

_HEADS, _HEAD_WIDTH = 2, 24
_TEXT_WIDTH = 32
_IMAGE_WIDTH = 40

TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": _HEADS,
    "attention_head_dim": _HEAD_WIDTH,
    "text_dim": _TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
}
VAE: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
TEXT_ENCODER: dict[str, Any] = {"d_model": _TEXT_WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_IMAGE_ENCODER: dict[str, Any] = {
    "hidden_size": _IMAGE_WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 16,
}
# Keys that diffusers added after the published files had been written, with their defaults.
_LATER: dict[str, dict[str, Any]] = {
    "model_index.json": {"boundary_ratio": None, "expand_timesteps": False, "transformer_2": [None, None]},
    "transformer/config.json": {"pos_embed_seq_len": None},
    "vae/config.json": {key: VAE_21[key] for key in VAE_21 if key.startswith("scale_factor")}
    | {"decoder_base_dim": None, "is_residual": False, "in_channels": 3, "out_channels": 3, "patch_size": None},
    "scheduler/scheduler_config.json": {
        "use_dynamic_shifting": False,
        "time_shift_type": "exponential",
        "sigma_min": None,
        "sigma_max": None,
        "shift_terminal": None,
    },
}


def make_checkpoint(
    folder: Path,
    kind: str,
    *,
    transformer: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    shift: float | None = None,
    seed: int = 0,
) -> Path:
    """Write a small checkpoint with the structure of a published model.

    Args:
        kind: The published model, one of `PUBLISHED`.
        transformer, vae, shift: Override the small configuration.
    """
    published = PUBLISHED[kind]
    torch.manual_seed(seed)
    experts = ["transformer", "transformer_2"] if published.two_experts else ["transformer"]
    clip = published.image_encoder is not None
    settings = published.transformer | TRANSFORMER
    if clip:
        settings |= {"image_dim": _IMAGE_WIDTH, "added_kv_proj_dim": _HEADS * _HEAD_WIDTH}
        if published.transformer["pos_embed_seq_len"] is not None:
            patches = (_IMAGE_ENCODER["image_size"] // _IMAGE_ENCODER["patch_size"]) ** 2
            settings |= {"pos_embed_seq_len": 2 * (patches + 1)}
    if "kept_blocks" in settings:
        settings |= {"kept_blocks": 0.3}  # A small video has few blocks.
    settings |= transformer or {}
    residual = published.vae is VAE_22
    for number, name in enumerate(experts):
        _save_expert(folder / name, settings, seed + number)
    small_vae = (VAE_22 | {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1}) if residual else VAE_21 | VAE
    autoencoder = diffusers.AutoencoderKLWan.from_config(small_vae | (vae or {}))
    set_own_values(autoencoder, seed).save_pretrained(folder / "vae")
    if residual:
        _add_settings(folder / "vae", {"clip_output": False})  # Published files have it; the class never had.
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    text = TEXT_ENCODER | {"vocab_size": len(tokenizer), "d_model": settings["text_dim"]}
    config = transformers.UMT5Config(**(published.text_encoder | text))
    set_own_values(transformers.UMT5EncoderModel(config), seed).save_pretrained(folder / "text_encoder")
    if clip:
        _save_image_encoder(folder, seed)
    diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=published.shift if shift is None else shift
    ).save_pretrained(folder / "scheduler")
    _write_index(folder, published, clip=clip)
    for file, later in _LATER.items():
        leave_out_later_keys(folder / file, later)
    return folder


def _save_expert(folder: Path, settings: dict[str, Any], seed: int) -> None:
    sparse = {key: settings[key] for key in SPARSE if key in settings}
    set_own_values(build_expert(settings), seed).save_pretrained(folder)
    _add_settings(folder, sparse)


def _add_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings, indent=2) + "\n")


def _save_image_encoder(folder: Path, seed: int) -> None:
    config = transformers.CLIPVisionConfig(hidden_act="gelu", **_IMAGE_ENCODER)
    encoder = transformers.CLIPVisionModelWithProjection(config)
    set_own_values(encoder, seed).save_pretrained(folder / "image_encoder")
    size = {"height": _IMAGE_ENCODER["image_size"], "width": _IMAGE_ENCODER["image_size"]}
    transformers.CLIPImageProcessor(size={"shortest_edge": size["height"]}, crop_size=size).save_pretrained(
        folder / "image_processor"
    )


def _write_index(folder: Path, published: WanConfig, *, clip: bool) -> None:
    """Write model_index.json as diffusers' save_pretrained does."""
    image_to_video = published.transformer["in_channels"] == 36
    index: dict[str, Any] = {
        "_class_name": "WanImageToVideoPipeline" if image_to_video else "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": published.boundary_ratio,
        "expand_timesteps": published.expand_timesteps,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if published.two_experts else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if image_to_video:
        index["image_encoder"] = ["transformers", "CLIPVisionModelWithProjection"] if clip else [None, None]
        index["image_processor"] = ["transformers", "CLIPImageProcessor"] if clip else [None, None]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
