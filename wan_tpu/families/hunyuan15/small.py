"""Make small checkpoints with the structure of every HunyuanVideo-1.5 model, from the libraries' own classes."""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from wan_tpu.families.hunyuan15.published import PUBLISHED
from wan_tpu.families.shared.tokenizer import make_qwen_tokenizer
from wan_tpu.families.shared.values import leave_out_later_keys, set_own_values

_TEXT_WIDTH, _GLYPH_WIDTH, _IMAGE_WIDTH = 32, 24, 16
_TRANSFORMER: dict[str, Any] = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "text_embed_dim": _TEXT_WIDTH,
    "text_embed_2_dim": _GLYPH_WIDTH,
    "image_embed_dim": _IMAGE_WIDTH,
    "rope_axes_dim": (4, 6, 6),
    "target_size": 80,
}
_VAE: dict[str, Any] = {"latent_channels": 4, "block_out_channels": [8, 8, 16, 16, 16], "layers_per_block": 1}
_QWEN: dict[str, Any] = {
    "hidden_size": _TEXT_WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
}
_BYT5: dict[str, Any] = {"d_model": _GLYPH_WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3}
_SIGLIP: dict[str, Any] = {
    "hidden_size": _IMAGE_WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 42,
}
# Qwen's chat template without tools and images, which no pipeline uses.
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    tokenizer, glyph_tokenizer = make_qwen_tokenizer(chat_template=_CHAT), transformers.ByT5Tokenizer()
    qwen = published.text_encoder | _QWEN | {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    byt5 = published.glyph_encoder | _BYT5 | {"vocab_size": len(glyph_tokenizer)}
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(**qwen)),
        "tokenizer_2": glyph_tokenizer,
        "text_encoder_2": transformers.T5EncoderModel(transformers.T5Config(**byt5)),
        "vae": diffusers.AutoencoderKLHunyuanVideo15.from_config(published.vae | _VAE | (vae or {})),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel.from_config(
            published.transformer | _TRANSFORMER | (transformer or {})
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=published.shift),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=published.guidance),
    }
    pipeline = diffusers.HunyuanVideo15Pipeline
    if published.image_encoder is not None:
        pipeline = diffusers.HunyuanVideo15ImageToVideoPipeline
        siglip = published.image_encoder | _SIGLIP
        size = {"height": siglip["image_size"], "width": siglip["image_size"]}
        parts |= {
            "image_encoder": transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**siglip)),
            "feature_extractor": transformers.SiglipImageProcessor(size=size),
        }
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            set_own_values(part, seed)
    pipeline(**parts).save_pretrained(folder)
    leave_out_later_keys(folder / "transformer" / "config.json", {"use_meanflow": False})
    return folder
