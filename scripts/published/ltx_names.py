"""How Lightricks names what diffusers names otherwise, and torch in float32: for the scripts that run their programs.

Source: scripts/convert_ltx2_to_diffusers.py of github.com/huggingface/diffusers at 58eb52c0.
"""

import types
from typing import Any

import torch

TRANSFORMER_NAMES = {
    "audio_patchify_proj": "audio_proj_in",
    "patchify_proj": "proj_in",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
    "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
    "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "prompt_adaln_single": "prompt_adaln",
    "audio_adaln_single": "audio_time_embed",
    "adaln_single": "time_embed",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
STATISTICS = {"mean-of-means": "latents_mean", "std-of-means": "latents_std"}
# What each kind of downsampling is called.
DOWNSAMPLING = {"spatial": "compress_space_res", "temporal": "compress_time_res", "spatiotemporal": "compress_all_res"}


class Float32(types.ModuleType):
    """torch, whose bfloat16 is float32."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def list_encoder_blocks(config: dict[str, Any]) -> list[tuple[str, dict[str, int]]]:
    """Return the blocks of a video encoder, from a configuration of diffusers."""
    blocks, channels = [], [config["latent_channels"], *config["block_out_channels"]]
    for i, kind in enumerate(config["downsample_type"]):
        blocks.append(("res_x", {"num_layers": config["layers_per_block"][i]}))
        blocks.append((DOWNSAMPLING[kind], {"multiplier": channels[i + 1] // channels[i]}))
    return [*blocks, ("res_x", {"num_layers": config["layers_per_block"][-1]})]
