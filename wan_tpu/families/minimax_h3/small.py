"""Make small checkpoints with the structure of MiniMax-H3, from the libraries' own classes."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from wan_tpu.families.minimax_h3 import classes
from wan_tpu.families.minimax_h3.components import add_gates
from wan_tpu.families.minimax_h3.fasth3 import CONTRACT, FIXED, FastH3
from wan_tpu.families.minimax_h3.published import PUBLISHED
from wan_tpu.families.shared.tokenizer import make_qwen_tokenizer
from wan_tpu.families.shared.values import set_own_values

_TEXT_WIDTH, _LATENTS, _AUDIO_LATENTS = 48, 8, 16
_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "hidden_size": 64,
    "num_layers": 3,
    "ffn_dim": 96,
    "in_channels": _LATENTS,
    "audio_in_channels": _AUDIO_LATENTS,
    "text_dim": _TEXT_WIDTH,
    "freq_dim": 32,
    "time_embed_hidden_dim": 48,
    "time_embed_dim": 40,
    "rope_freq_dim": 4,
}
_QWEN: dict[str, Any] = {
    "hidden_size": _TEXT_WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": _TEXT_WIDTH,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1, 2],
}
_VAE: dict[str, Any] = {
    "latent_channels": _LATENTS,
    "block_out_channels": [8, 8, 8, 16, 16, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 32,
}
_AUDIO_VAE: dict[str, Any] = {
    "encoder_dim": 4,
    "latent_dim": 64,
    "latent_channels": _AUDIO_LATENTS,
    "num_attention_heads": 4,
    "decoder_dim": 128,
    "resblock_kernel_sizes": [3, 7],
    "resblock_dilation_sizes": [[1, 3], [1, 3]],
}
_VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
# The short side and the most pixels of a reference video, and the short side of a reference image.
_CANVAS = {"canvas_short_edge": 64, "canvas_max_pixels": 64 * 96, "reference_image_short_edge": 96}
# Pixels of the smallest and of the largest picture that the text encoder reads.
_PICTURE = {"shortest_edge": 32 * 32, "longest_edge": 16777216}


def make_checkpoint(
    folder: Path,
    kind: str = "minimax-h3",
    *,
    transformer: dict[str, Any] | None = None,
    text_encoder: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    audio_vae: dict[str, Any] | None = None,
    fasth3: FastH3 | None = None,
    seed: int = 0,
) -> Path:
    """Write a small checkpoint with the published model's structure, in the layout of diffusers' modular pipelines.

    Args:
        folder: Where to write it.
        kind: The published model, one of `PUBLISHED`.
        transformer, text_encoder, vae, audio_vae: Override the small configuration.
        fasth3: What to write in FastVideo's file; the transformer then has gates.
        seed: The seed of all weights.
    """
    published, tokenizer = PUBLISHED[kind], make_qwen_tokenizer([*_VISION_TOKENS.values()])
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)

    def draw_statistics(channels: int) -> dict[str, list[float]]:
        mean = torch.randn(channels, generator=generator) / 4
        return {"latents_mean": mean.tolist(), "latents_std": (1 + mean.abs()).tolist()}

    small_vae = classes.VAE | _VAE | draw_statistics(_LATENTS) | (vae or {})
    small_audio = classes.AUDIO_VAE | _AUDIO_VAE | draw_statistics(_AUDIO_LATENTS) | (audio_vae or {})
    settings = published.transformer | _TRANSFORMER | (transformer or {})
    parts: dict[str, Any] = {
        "transformer": diffusers.MiniMaxH3Transformer3DModel.from_config(settings),
        "transformer_ref": diffusers.MiniMaxH3Transformer3DModel.from_config(settings),
        "text_encoder": _make_qwen(published.text_encoder | _QWEN | (text_encoder or {}), tokenizer),
        "vae": diffusers.AutoencoderKLMiniMaxH3.from_config(small_vae),
        "audio_vae": diffusers.AutoencoderKLMiniMaxH3Audio.from_config(small_audio),
        "scheduler": diffusers.MiniMaxH3Scheduler(**published.scheduler),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(**published.audio_scheduler),
        "tokenizer": tokenizer,
        "processor": transformers.Qwen2VLImageProcessorPil(
            patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=_PICTURE
        ),
    }
    if fasth3 is not None:
        add_gates(parts["transformer"])
        steps = [round(1000 * level) for level in fasth3.levels]
        shifts = {"video_scheduler_shift": 10.0, "audio_scheduler_shift": 3.0}
        numbers = {"vsa_sparsity": fasth3.sparsity, "dmd_denoising_steps": steps, "transformer_forwards": len(steps)}
        contract = FIXED | numbers | shifts
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONTRACT).write_text(json.dumps(contract, indent=2) + "\n")
    index: dict[str, Any] = {
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_class_name": "MiniMaxH3ModularPipeline",
        "_diffusers_version": diffusers.__version__,
        **_CANVAS,
    }
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            set_own_values(part, seed + (name == "transformer_ref"))
        if isinstance(part, diffusers.MiniMaxH3Transformer3DModel):
            _strengthen_attention(part)
        part.save_pretrained(folder / name)
        library = type(part).__module__.partition(".")[0]
        hint = [library, "Qwen3VLProcessor" if name == "processor" else type(part).__name__]
        source = {"pretrained_model_name_or_path": None, "revision": None, "subfolder": name, "variant": None}
        index[name] = [*hint, {"type_hint": hint, **source}]
    (folder / "modular_model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def _strengthen_attention(transformer: torch.nn.Module) -> None:
    """Let the prompt and the keyframes, few of the sequence's rows, change the latents by more than rounding does."""
    for name, tensor in transformer.state_dict().items():
        if name.startswith("transformer_blocks.") and (".adaln_proj." in name or ".to_v." in name):
            tensor *= 5


def _make_qwen(
    text: dict[str, Any], tokenizer: transformers.PreTrainedTokenizerBase
) -> transformers.Qwen3VLForConditionalGeneration:
    config = transformers.Qwen3VLConfig(
        text_config=text | {"vocab_size": len(tokenizer)},
        vision_config=PUBLISHED["minimax-h3"].vision | _VISION | {"out_hidden_size": text["hidden_size"]},
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in _VISION_TOKENS.items()},
    )
    return transformers.Qwen3VLForConditionalGeneration(config)
