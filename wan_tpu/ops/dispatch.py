"""The operations of transformers and VAEs on one device's arrays: our kernels on TPU, plain XLA elsewhere.

Models call `Ops` inside `jax.shard_map`; they never name a kernel. Attention, which has variants, is called through
`wan_tpu.ops.attention` and `wan_tpu.ops.sparse_linear`.
Shapes: L rows (tokens), I inputs, O outputs, C channels, G column groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from wan_tpu.switches import uses_kernel
from wan_tpu_kernels.catalogue import KERNELS
from wan_tpu_kernels.low_precision import Rounded


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
    window_attention: Callable[..., jax.Array]
    norm_qkv: Callable[..., Any]
    norm_swiglu: Callable[..., jax.Array]


def ops_for(platform: str) -> Ops:
    """Return the operations for "tpu", "gpu" or "cpu"; kernels that `wan_tpu.switches` turns off become plain XLA."""
    return Ops(
        **{name: KERNELS[name].run if uses_kernel(name, platform) else KERNELS[name].reference for name in Ops._fields}
    )
