"""T5 and UMT5 encoders: how they are built and sharded, and the part that is replaced for XLA."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import torch
import transformers
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.runtime.bridge import to_jax, to_torch
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule

# Shardings of projections [O outputs, I inputs].
_REPLICATED = ()
_COLUMNS = ("tp", None)  # Heads or hidden units are split over 'tp'.
_ROWS = (None, "tp")  # The inputs of the projection that follows are split; its bias [O] is whole.

RULES = (
    Rule(r"shared\.weight", _COLUMNS),  # [vocabulary, C]
    Rule(r"encoder\.block\..*\.SelfAttention\.(q|k|v)\.weight", _COLUMNS),
    Rule(r"encoder\.block\..*\.SelfAttention\.o\.weight", _ROWS),
    Rule(r"encoder\.block\..*\.relative_attention_bias\.weight", (None, "tp")),  # [buckets, N]
    Rule(r"encoder\.block\..*\.DenseReluDense\.(wi|wi_0|wi_1)\.weight", _COLUMNS),
    Rule(r"encoder\.block\..*\.DenseReluDense\.wo\.weight", _ROWS),
    Rule(r"encoder\..*layer_norm\.weight", _REPLICATED),  # [C]
)


def text_encoder(kind: str, config: dict[str, Any]) -> Component:
    """Return UMT5, or T5, whose blocks differ and aren't scanned.

    Raises:
        CheckpointError: The class is neither of these.
    """
    if kind not in ("UMT5EncoderModel", "T5EncoderModel"):
        raise CheckpointError(f"text encoder {kind} is not supported; UMT5EncoderModel and T5EncoderModel are")
    return Component(
        folder="text_encoder",
        build=lambda: from_transformers(getattr(transformers, kind), config),
        adapt=_adapt,
        scanned=("encoder.block",) if kind == "UMT5EncoderModel" else (),
        rules=RULES,
    )


def from_transformers(kind: Any, config: Mapping[str, Any]) -> torch.nn.Module:
    """Build a module of transformers from its configuration."""
    return kind._from_config(complete_config(kind, config), attn_implementation="eager")


def complete_config(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return the configuration of a class of transformers with all its defaults."""
    settings = {key: value for key, value in config.items() if not re.match(r"_|architectures|(torch_)?dtype", key)}
    return kind.config_class(**settings)


def _adapt(module: torch.nn.Module, mesh: Mesh) -> None:
    """Replace the table look-ups of relative positions, which are 262,144 per layer for 512 tokens."""
    for name, child in module.named_modules():
        if name.endswith("relative_attention_bias"):
            child.forward = functools.partial(_look_up, child)


def _look_up(table: torch.nn.Embedding, index: torch.Tensor) -> torch.Tensor:
    """Look up index [...] in a table of few rows, as nn.Embedding does, by a product with one-hot rows: [..., N].

    A TPU gathers one row at a time; the product is exact, since each sum has only one nonzero term.
    """
    rows = to_jax(table.weight)
    return to_torch(jax.nn.one_hot(to_jax(index), rows.shape[0], dtype=rows.dtype) @ rows)
