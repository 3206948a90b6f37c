"""All kernels, each with its reference. Switches, the checks of `wan-tpu doctor` and plans derive from this table."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from wan_tpu_kernels.flash_attention import flash_attention, flash_attention_reference
from wan_tpu_kernels.head_norm_rope import head_norm_rope, head_norm_rope_reference
from wan_tpu_kernels.layer_norm import layer_norm, layer_norm_reference
from wan_tpu_kernels.linear import linear, linear_reference
from wan_tpu_kernels.low_precision import round_rows, round_rows_reference
from wan_tpu_kernels.rms_norm_rope import rms_norm_rope, rms_norm_rope_reference
from wan_tpu_kernels.sparse_attention import sparse_attention, sparse_attention_reference
from wan_tpu_kernels.vae.causal_conv import causal_conv, causal_conv_reference
from wan_tpu_kernels.vae.folded_conv import folded_conv, folded_conv_reference
from wan_tpu_kernels.vae.group_norm import (
    channel_moments,
    channel_moments_reference,
    norm_silu,
    norm_silu_reference,
)
from wan_tpu_kernels.vsa.tile_attention import tile_attention, tile_attention_reference
from wan_tpu_kernels.windows.attention import window_attention, window_attention_reference
from wan_tpu_kernels.windows.norm_qkv import norm_qkv, norm_qkv_reference
from wan_tpu_kernels.windows.norm_swiglu import norm_swiglu, norm_swiglu_reference

MATMUL, CONVOLUTION, ATTENTION, VECTOR = "matmul", "convolution", "attention", "vector"


class Kernel(NamedTuple):
    """A kernel of ours.

    Attributes:
        run: The function that is called on a TPU.
        reference: The same in plain XLA, for other platforms.
        calls: How the names of its Pallas calls begin, and the kind of work that a plan counts each as.
    """

    run: Callable[..., Any]
    reference: Callable[..., Any]
    calls: Mapping[str, str]


# By the names that --kernels takes.
KERNELS: dict[str, Kernel] = {
    "attention": Kernel(
        flash_attention,
        flash_attention_reference,
        {"flash_attention": ATTENTION, "key_range": VECTOR, "round_keys": VECTOR, "round_queries": VECTOR},
    ),
    "sparse_attention": Kernel(
        sparse_attention,
        sparse_attention_reference,
        {"sparse_attention": ATTENTION, "linear_attention": ATTENTION, "top_lists": ATTENTION, "block_means": VECTOR},
    ),
    "tile_attention": Kernel(tile_attention, tile_attention_reference, {"tile_attention": ATTENTION}),
    "window_attention": Kernel(window_attention, window_attention_reference, {"window_attention": ATTENTION}),
    "norm_qkv": Kernel(norm_qkv, norm_qkv_reference, {"norm_qkv": MATMUL}),
    "norm_swiglu": Kernel(norm_swiglu, norm_swiglu_reference, {"norm_swiglu": MATMUL}),
    "linear": Kernel(linear, linear_reference, {"linear": MATMUL}),
    "layer_norm": Kernel(layer_norm, layer_norm_reference, {"layer_norm": VECTOR, "rms_norm_shift": VECTOR}),
    "round_rows": Kernel(round_rows, round_rows_reference, {"round_rows": VECTOR}),
    "rms_norm_rope": Kernel(rms_norm_rope, rms_norm_rope_reference, {"rms_norm": VECTOR}),
    "head_norm_rope": Kernel(head_norm_rope, head_norm_rope_reference, {"head_norm": VECTOR}),
    "causal_conv": Kernel(causal_conv, causal_conv_reference, {"causal_conv": CONVOLUTION}),
    "folded_conv": Kernel(folded_conv, folded_conv_reference, {"folded_causal_conv": CONVOLUTION}),
    "channel_moments": Kernel(channel_moments, channel_moments_reference, {"channel_moments": VECTOR}),
    "norm_silu": Kernel(norm_silu, norm_silu_reference, {"norm_silu": VECTOR}),
}


def find_kind(call: str) -> str | None:
    """Return the kind of work of a Pallas call, by its name; None if it is of no kernel of ours.

    Where a result goes somewhere else than usual, the compiler adds that to the name: "linear.15.x_ref".
    """
    call = call.partition(".")[0]
    kinds = {start: kind for kernel in KERNELS.values() for start, kind in kernel.calls.items()}
    starts = [start for start in kinds if f"{call}_".startswith(f"{start}_")]
    return kinds[max(starts, key=len)] if starts else None
