"""The operations of transformers and VAEs on one device's arrays: our kernels on TPU, plain XLA elsewhere.

Models call these inside `jax.shard_map`; they never name a kernel.
Shapes: L rows (tokens), I inputs, O outputs, C channels, G column groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from wan_tpu.switches import uses_kernel
from wan_tpu_kernels.head_norm_rope import head_norm_rope, head_norm_rope_reference
from wan_tpu_kernels.layer_norm import layer_norm, layer_norm_reference
from wan_tpu_kernels.linear import linear, linear_reference
from wan_tpu_kernels.low_precision import Rounded, round_rows, round_rows_reference
from wan_tpu_kernels.rms_norm_rope import rms_norm_rope, rms_norm_rope_reference
from wan_tpu_kernels.vae.causal_conv import causal_conv, causal_conv_reference
from wan_tpu_kernels.vae.folded_conv import folded_conv, folded_conv_reference
from wan_tpu_kernels.vae.group_norm import (
    channel_moments,
    channel_moments_reference,
    norm_silu,
    norm_silu_reference,
)

# Each kernel and its reference in plain XLA.
IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (linear, linear_reference),
    "layer_norm": (layer_norm, layer_norm_reference),
    "round_rows": (round_rows, round_rows_reference),
    "rms_norm_rope": (rms_norm_rope, rms_norm_rope_reference),
    "head_norm_rope": (head_norm_rope, head_norm_rope_reference),
    "causal_conv": (causal_conv, causal_conv_reference),
    "folded_conv": (folded_conv, folded_conv_reference),
    "channel_moments": (channel_moments, channel_moments_reference),
    "norm_silu": (norm_silu, norm_silu_reference),
}


class Ops(NamedTuple):
    """The operations for one platform; each is documented at the kernel of the same name."""

    linear: Callable[..., jax.Array]
    layer_norm: Callable[..., Any]
    round_rows: Callable[..., Rounded]
    rms_norm_rope: Callable[..., Any]
    head_norm_rope: Callable[..., Any]
    causal_conv: Callable[..., jax.Array]
    folded_conv: Callable[..., Any]
    channel_moments: Callable[..., Any]
    norm_silu: Callable[..., jax.Array]


def ops_for(platform: str) -> Ops:
    """Return the operations for "tpu", "gpu" or "cpu"; kernels that `wan_tpu.switches` turns off become plain XLA."""
    return Ops(
        **{name: kernel if uses_kernel(name, platform) else plain for name, (kernel, plain) in IMPLEMENTATIONS.items()}
    )
