"""Makes small checkpoints with the structure of every Helios model, from diffusers' and transformers' own classes."""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from wan_tpu.families.helios.published import PUBLISHED
from wan_tpu.families.shared.tokenizer import train_tokenizer
from wan_tpu.families.shared.values import set_own_values

_TEXT_WIDTH = 32
_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "rope_dim": [4, 4, 4],
    "text_dim": _TEXT_WIDTH,
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
}
_VAE: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
_TEXT_ENCODER: dict[str, Any] = {"d_model": _TEXT_WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def make_checkpoint(
    folder: Path,
    kind: str,
    *,
    transformer: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a small checkpoint with the structure of a published model.

    Args:
        folder: Where to write it.
        kind: The published model, one of `PUBLISHED`.
        transformer, vae, scheduler: Override the small configuration.
        seed: The seed of all weights.
    """
    published = PUBLISHED[kind]
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    text = published.text_encoder | _TEXT_ENCODER | {"vocab_size": len(tokenizer)}
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": transformers.UMT5EncoderModel(transformers.UMT5Config(**text)),
        "vae": diffusers.AutoencoderKLWan.from_config(published.vae | _VAE | (vae or {})),
        "transformer": diffusers.HeliosTransformer3DModel.from_config(
            published.transformer | _TRANSFORMER | (transformer or {})
        ),
        "scheduler": _make_scheduler(kind, scheduler or {}),
    }
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            set_own_values(part, seed)
    if published.pyramid.stages == 1:
        diffusers.HeliosPipeline(**parts).save_pretrained(folder)
    else:
        ways = {"is_distilled": published.distilled, "is_cfg_zero_star": published.scaled_guidance}
        diffusers.HeliosPyramidPipeline(**parts, **ways).save_pretrained(folder)
    return folder


def _make_scheduler(kind: str, changed: dict[str, Any]) -> Any:
    pyramid = PUBLISHED[kind].pyramid
    settings: dict[str, Any] = {
        "stages": pyramid.stages,
        "stage_range": list(pyramid.stage_range),
        "gamma": pyramid.gamma,
        "shift": pyramid.shift,
        "use_dynamic_shifting": pyramid.dynamic,
        "time_shift_type": pyramid.shift_type,
    }
    if pyramid.solver == "dmd":
        return diffusers.HeliosDMDScheduler(**(settings | changed))
    return diffusers.HeliosScheduler(**(settings | {"scheduler_type": pyramid.solver} | changed))
