"""Make small checkpoints with the structure of every LTX-2 model, from the libraries' own classes."""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

from wan_tpu.families.ltx2.config import is_25
from wan_tpu.families.ltx2.published import PUBLISHED
from wan_tpu.families.shared.values import set_own_values

_TEXT_WIDTH, _WIDTH, _AUDIO_WIDTH, _LATENTS, _MEL_BINS = 48, 64, 32, 16, 16
_AUDIO_LATENTS = 8
_PACKED = _AUDIO_LATENTS * _MEL_BINS // 4  # Channels of an audio token; the VAE keeps its statistics for these.
_TRANSFORMER: dict[str, Any] = {
    "in_channels": _LATENTS,
    "out_channels": _LATENTS,
    "num_attention_heads": 4,
    "attention_head_dim": _WIDTH // 4,
    "cross_attention_dim": _WIDTH,
    "audio_in_channels": _PACKED,
    "audio_out_channels": _PACKED,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": _AUDIO_WIDTH // 4,
    "audio_cross_attention_dim": _AUDIO_WIDTH,
    "num_layers": 3,
    "caption_channels": _TEXT_WIDTH,
}
_CONNECTORS: dict[str, Any] = {
    "caption_channels": _TEXT_WIDTH,
    "video_connector_num_layers": 2,
    "video_connector_num_learnable_registers": 128,
    "audio_connector_num_layers": 2,
    "audio_connector_num_learnable_registers": 64,
}
_CONNECTORS_20: dict[str, Any] = {
    "video_connector_num_attention_heads": 6,
    "video_connector_attention_head_dim": _TEXT_WIDTH // 6,
    "audio_connector_num_attention_heads": 6,
    "audio_connector_attention_head_dim": _TEXT_WIDTH // 6,
}
_CONNECTORS_23: dict[str, Any] = {
    "video_connector_num_attention_heads": 4,
    "video_connector_attention_head_dim": _WIDTH // 4,
    "audio_connector_num_attention_heads": 4,
    "audio_connector_attention_head_dim": _AUDIO_WIDTH // 4,
    "video_hidden_dim": _WIDTH,
    "audio_hidden_dim": _AUDIO_WIDTH,
}
_AUDIO_VAE: dict[str, Any] = {"base_channels": _PACKED, "latent_channels": _AUDIO_LATENTS, "mel_bins": _MEL_BINS}
_VOCODER: dict[str, Any] = {
    "in_channels": 2 * _MEL_BINS,
    "hidden_channels": 32,
    "resnet_kernel_sizes": [3, 7],
    "resnet_dilations": [[1, 3], [1, 3]],
}
_VOCODER_20: dict[str, Any] = {"upsample_kernel_sizes": [16, 15, 8], "upsample_factors": [6, 5, 8]}
_VOCODER_23: dict[str, Any] = {
    "upsample_kernel_sizes": [11, 8, 16],
    "upsample_factors": [5, 4, 8],
    "bwe_in_channels": 2 * _MEL_BINS,
    "bwe_hidden_channels": 16,
    "bwe_upsample_kernel_sizes": [12, 11, 16],
    "bwe_upsample_factors": [6, 5, 8],
    "bwe_resnet_kernel_sizes": [3, 7],
    "bwe_resnet_dilations": [[1, 3], [1, 3]],
    "num_mel_channels": _MEL_BINS,
}
_UPSAMPLER: dict[str, Any] = {"in_channels": _LATENTS, "mid_channels": 32, "num_blocks_per_stage": 1}
_DIFFUSION_DECODER: dict[str, Any] = {
    "latent_channels": _LATENTS,
    "decoder_head_dim": 16,
    "decoder_stage_channels": [128, 64, 32, 32, 16],
    "decoder_stage_depths": [1, 2, 1, 1, 2],
    "decoder_stage_kernels": [[3, 3, 5], [3, 3, 5], [3, 3, 3], [3, 5, 3]],
    "decoder_stage5_kernel": [5, 7, 3],
}
# Two groups of layers, each of which ends with one that sees everything.
_GEMMAS: dict[str, Any] = {
    "hidden_size": _TEXT_WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_GEMMA, _GEMMA_4 = _GEMMAS | {"query_pre_attn_scalar": 16}, _GEMMAS | {"global_head_dim": 32}
_IMAGE_TOKENS = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
_PATCHES: dict[str, Any] = {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 4}
_SOUND: dict[str, Any] = {"audio_embed_dim": 16}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def make_checkpoint(
    folder: Path,
    kind: str,
    *,
    transformer: dict[str, Any] | None = None,
    connectors: dict[str, Any] | None = None,
    text_encoder: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    audio_vae: dict[str, Any] | None = None,
    vocoder: dict[str, Any] | None = None,
    upsampler: bool = True,
    seed: int = 0,
) -> Path:
    """Write a small checkpoint with the structure of a published model.

    Args:
        folder: Where to write it.
        kind: The published model, one of `PUBLISHED`.
        transformer, connectors, text_encoder, vae, audio_vae, vocoder: Override the small configuration.
        upsampler: Whether it also has the model that doubles the size of its latents.
        seed: The seed of all weights.
    """
    published = PUBLISHED[kind]
    bandwidth_extension = published.vocoder["_class_name"] == "LTX2VocoderWithBWE"
    torch.manual_seed(seed)
    tokenizer = _make_tokenizer(begins=not is_25(published))
    small_gemma = _GEMMA_4 if is_25(published) else _GEMMA
    gemma = published.text_encoder | small_gemma | {"vocab_size": len(tokenizer)} | (text_encoder or {})
    small_connectors = _CONNECTORS | {"text_proj_in_factor": gemma["num_hidden_layers"] + 1}
    small_connectors |= _CONNECTORS_23 if published.connectors["per_modality_projections"] else _CONNECTORS_20
    small_vae: dict[str, Any] = {
        "latent_channels": _LATENTS,
        "layers_per_block": [1] * len(published.vae["layers_per_block"]),
        "decoder_layers_per_block": [1] * len(published.vae["decoder_layers_per_block"]),
    }
    for key in ("block_out_channels", "decoder_block_out_channels"):
        small_vae[key] = [channels // 32 for channels in published.vae[key]]
    small_vocoder = _VOCODER | (_VOCODER_23 if bandwidth_extension else _VOCODER_20)
    vocoder_class = LTX2VocoderWithBWE if bandwidth_extension else LTX2Vocoder
    parts: dict[str, Any] = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**published.scheduler),
        "vae": diffusers.AutoencoderKLLTX2Video.from_config(published.vae | small_vae | (vae or {})),
        "audio_vae": diffusers.AutoencoderKLLTX2Audio.from_config(published.audio_vae | _AUDIO_VAE | (audio_vae or {})),
        "text_encoder": _make_gemma_4(gemma, tokenizer) if is_25(published) else _make_gemma(gemma, tokenizer),
        "tokenizer": tokenizer,
        "connectors": LTX2TextConnectors.from_config(published.connectors | small_connectors | (connectors or {})),
        "transformer": diffusers.LTX2VideoTransformer3DModel.from_config(
            published.transformer | _TRANSFORMER | (transformer or {})
        ),
        "vocoder": vocoder_class.from_config(published.vocoder | small_vocoder | (vocoder or {})),
    }
    if is_25(published):
        parts["duration_head"] = LTX2DurationHead(
            _WIDTH, _AUDIO_WIDTH, pooler_hidden_dim=32, num_queries=2, num_pooler_heads=4, mlp_hidden_dim=24
        )
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            set_own_values(part, seed)
    for name in ("connectors", "transformer", "vocoder", "duration_head"):
        if name in parts:
            _strengthen(parts[name], seed)
    if bandwidth_extension:
        _keep_in_range(parts["vocoder"])
    diffusers.LTX2Pipeline(**parts).save_pretrained(folder)
    if is_25(published):
        decoder = set_own_values(diffusers.LTX2VideoDiffusionDecoderModel(**_DIFFUSION_DECODER), seed)
        _strengthen(decoder, seed)
        for name in ("latents_mean", "latents_std"):  # As in the VAE.
            getattr(decoder, name).copy_(getattr(parts["vae"], name))
        decoder.save_pretrained(folder / "diffusion_decoder")
    if upsampler:
        doubled = LTX2LatentUpsamplerModel.from_config((published.upsampler or {}) | _UPSAMPLER)
        set_own_values(doubled, seed).save_pretrained(folder / "latent_upsampler")
    return folder


def _make_gemma(
    text: dict[str, Any], tokenizer: transformers.PreTrainedTokenizerBase
) -> transformers.Gemma3ForConditionalGeneration:
    """Return Gemma 3 with a vision tower, which is in published checkpoints, though LTX-2 doesn't use it."""
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in _IMAGE_TOKENS.items()},
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _make_gemma_4(
    text: dict[str, Any], tokenizer: transformers.PreTrainedTokenizerBase
) -> transformers.Gemma4UnifiedForConditionalGeneration:
    """Return Gemma 4 with what embeds images and sounds, which is in published checkpoints, too."""
    tokens = zip(("image_token_id", "boi_token_id", "eoi_token_id"), _IMAGE_TOKENS.values(), strict=True)
    config = transformers.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=_PATCHES | {"output_proj_dims": _TEXT_WIDTH},
        audio_config=_SOUND,
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens},
    )
    return transformers.Gemma4UnifiedForConditionalGeneration(config)


def _make_tokenizer(*, begins: bool) -> transformers.PreTrainedTokenizerBase:
    """Return a Gemma tokenizer of characters and bytes, without merges, that puts <bos> before every prompt or not."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    return transformers.GemmaTokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        additional_special_tokens=list(_IMAGE_TOKENS.values()),
        model_max_length=1024,
        add_bos_token=begins,
    )


def _strengthen(part: torch.nn.Module, seed: int) -> None:
    """Give layers weights that pass on their input's variance, and attention that prefers some tokens to others.

    Otherwise sound would be its biases, and a prompt's tokens would drown in the learned ones after them.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, layer in part.named_modules():
        if isinstance(layer, torch.nn.Linear) or (isinstance(layer, torch.nn.Conv1d) and "resnets" not in name):
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="linear", generator=generator)
        elif isinstance(layer, torch.nn.ConvTranspose1d):
            inputs = layer.in_channels * layer.kernel_size[0] // layer.stride[0]
            torch.nn.init.normal_(layer.weight, std=inputs**-0.5, generator=generator)
        elif name.endswith("norm_q"):
            layer.weight.data *= 2


def _keep_in_range(vocoder: LTX2VocoderWithBWE) -> None:
    """Keep a vocoder's sound from being clipped, and its spectrogram above zero, as its logarithm needs."""
    for part in (vocoder.vocoder, vocoder.bwe_generator):
        part.conv_out.weight.data /= 16
    vocoder.mel_stft.mel_basis.abs_()
