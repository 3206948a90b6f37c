"""The transformer of a MiniMax-H3 model: how it is built, adapted, scanned and sharded."""

import functools

import numpy as np
import torch
from diffusers import MiniMaxH3Transformer3DModel

from wan_tpu.families.minimax_h3 import sharding
from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.families.minimax_h3.layers import GATE
from wan_tpu.runtime.components import Component

# The names in the model's own files, from scripts/convert_minimax_h3_to_diffusers.py and the loader of adapters in
# github.com/huggingface/diffusers at 0.42.1. Queries, keys and values are one matrix there.
_ORIGINALS = (
    (r"^token_refiner\.refiner_blocks\.", "token_refiner.blocks."),
    (r"^transformer_blocks\.", "blocks."),
    (r"\.attn\.to_[qkv]\.", ".attn.qkv_proj."),
    (r"\.attn\.to_out\.0\.", ".attn.out_proj."),
    (r"\.attn\.norm_([qk])\.", r".attn.\1_norm."),
    (r"\.ff\.net\.0\.proj\.", ".mlp.fc1."),
    (r"\.ff\.net\.2\.", ".mlp.fc2."),
    (r"^proj_in\.", "video_patch_proj."),
    (r"^audio_proj_in\.", "audio_patch_proj."),
    (r"^context_embedder\.", "condition_proj."),
    (r"^time_embedder\.linear_1\.", "time_embedder.proj_in."),
    (r"^time_embedder\.linear_2\.", "time_embedder.proj_out."),
    (r"^norm_out\.linear\.", "final_layer.adaln_proj.linear."),
    (r"^norm_out\.norm\.", "final_layer.norm."),
    (r"^proj_out\.", "final_layer.video_out."),
    (r"^audio_proj_out\.", "final_layer.audio_out."),
)
# Input projections, the embedding of timesteps and the heads, which diffusers keeps in float32, too.
FLOAT32 = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")


def transformer(config: MiniMaxH3Config, folder: str = "transformer") -> Component:
    """Return a checkpoint's transformer, with its heads' channels in the order of our kernels (`pair_channels`)."""
    heads, rotated = (config.transformer[key] for key in ("num_attention_heads", "rope_freq_dim"))

    def pair(values: np.ndarray) -> np.ndarray:
        return pair_channels(values, heads, 3 * rotated)

    def pair_norm(values: np.ndarray) -> np.ndarray:
        return pair_channels(values, 1, 3 * rotated)

    return Component(
        folder=folder,
        build=lambda: build_transformer(config),
        adapt=lambda module, mesh: None,
        scanned=("transformer_blocks",),
        rules=sharding.RULES,
        float32=FLOAT32,
        changes=(
            (r"transformer_blocks\.\*\.attn\.to_[qk]\.weight", pair),
            (r"transformer_blocks\.\*\.attn\.norm_[qk]\.weight", pair_norm),
        ),
        matrices=sharding.MATRICES,
        logits=True,
        originals=_ORIGINALS,
        added={f"transformer_blocks.template.{GATE}.weight": "transformer_blocks.template.attn.to_q.weight"},
        header_alpha=True,
        original_rows=(
            (r"(token_refiner[._])?blocks[._]\d+[._]mlp[._]fc1", _swap_halves),
            (r"(token_refiner[._])?blocks[._]\d+[._]attn[._]qkv_proj", functools.partial(_group_rows, heads)),
        ),
    )


def build_transformer(config: MiniMaxH3Config) -> MiniMaxH3Transformer3DModel:
    """Return diffusers' module, with gates if the checkpoint has some."""
    module = MiniMaxH3Transformer3DModel.from_config(config.transformer)
    if config.fasth3 is not None:
        add_gates(module)
    return module


def add_gates(module: MiniMaxH3Transformer3DModel) -> None:
    """Add the matrix by which each block's attention weights the results of FastVideo's coarse branch."""
    for block in module.transformer_blocks:
        outputs, inputs = block.attn.to_q.weight.shape
        block.attn.to_gate_compress = torch.nn.Linear(inputs, outputs, bias=False)


def _swap_halves(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Reorder the rows so that values come before their gates."""
    return torch.cat(rows.chunk(2)[::-1])


def _group_rows(heads: int, rows: torch.Tensor, name: str) -> torch.Tensor:
    """Reorder the rows so that all queries come first, then all keys and values.

    Only DiffSynth leaves them as the model's own files have them, head by head; its files are those with "default".
    """
    if ".default" not in name or len(rows) % (3 * heads):
        return rows
    return torch.cat([part.flatten(0, 1) for part in rows.unflatten(0, (heads, -1)).chunk(3, dim=1)])


def pair_channels(values: np.ndarray, heads: int, angles: int) -> np.ndarray:
    """Reorder the channels of queries or keys, [N*D, ...], so that all pairs for RoPE are (i, i + D/2).

    The model has the pairs (i, i + angles), and leaves the channels behind them as they are; half of these go behind
    each half of the pairs.
    """
    per_head = values.reshape(heads, -1, *values.shape[1:])
    unrotated = (per_head.shape[1] - 2 * angles) // 2
    first, second, third, fourth = np.split(per_head, np.cumsum([angles, angles, unrotated]), axis=1)
    return np.ascontiguousarray(np.concatenate([first, third, second, fourth], axis=1)).reshape(values.shape)
