"""Make small checkpoints with the structure of every Helios model, from diffusers' and transformers' own classes."""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from wan_tpu.families.helios.published import PUBLISHED
from wan_tpu.families.shared.tokenizer import train_tokenizer
from wan_tpu.families.shared.values import set_own_values
from wan_tpu.families.wan.small import TEXT_ENCODER, TRANSFORMER, VAE

_TRANSFORMER = TRANSFORMER | {"num_attention_heads": 4, "attention_head_dim": 12, "rope_dim": [4, 4, 4]}


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
        kind: The published model, one of `PUBLISHED`.
        transformer, vae, scheduler: Override the small configuration.
    """
    published = PUBLISHED[kind]
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    text = published.text_encoder | TEXT_ENCODER | {"vocab_size": len(tokenizer)}
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": transformers.UMT5EncoderModel(transformers.UMT5Config(**text)),
        "vae": diffusers.AutoencoderKLWan.from_config(published.vae | VAE | (vae or {})),
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
        flags = {"is_distilled": published.distilled, "is_cfg_zero_star": published.scaled_guidance}
        diffusers.HeliosPyramidPipeline(**parts, **flags).save_pretrained(folder)
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
