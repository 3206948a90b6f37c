"""The piece of transformers' UMT5 and T5 encoders that is replaced for XLA. Parameter names stay the checkpoint's."""

import functools

import jax
import torch
from jax.sharding import Mesh

from wan_tpu.runtime.bridge import to_jax, to_torch


def adapt_text_encoder(module: torch.nn.Module, mesh: Mesh) -> None:
    """Replace the table look-ups of relative positions, 262,144 a layer for 512 tokens."""
    for name, child in module.named_modules():
        if name.endswith("relative_attention_bias"):
            child.forward = functools.partial(_look_up, child)


def _look_up(table: torch.nn.Embedding, index: torch.Tensor) -> torch.Tensor:
    """nn.Embedding.forward for a table of few rows: index [...] -> [..., N], as a product with one-hot rows.

    A TPU gathers a row at a time; the product is exact, since each sum has one term that isn't zero.
    """
    rows = to_jax(table.weight)
    return to_torch(jax.nn.one_hot(to_jax(index), rows.shape[0], dtype=rows.dtype) @ rows)
