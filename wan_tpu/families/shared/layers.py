"""Layers of a transformer inside a `jax.shard_map`: each one's weights gathered while earlier ones are in use."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from wan_tpu.ops.collectives import gather_rows
from wan_tpu.ops.dispatch import Ops
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.mesh import SHARDS
from wan_tpu_kernels.low_precision import Rounded

T = TypeVar("T")  # one array, or several
SPLIT = P(None, SHARDS, None)  # of a large matrix, stacked over the layers: its outputs over the devices of a branch


def scan_layers(
    layer: Callable[[T, Params, jax.Array], T],
    hidden: T,
    stacked: Params,
    specs: Mapping[str, P],
    *,
    depth: int,
    ahead: Sequence[str],
    platform: str,
) -> T:
    """Run (hidden, weights of a layer, its index) -> hidden for every layer.

    stacked  this device's part of the weights, [depth, ...]; specs say how they are split
    ahead    names of those that are gathered a layer early: needed before or right after what takes longest
    """

    def gathered(names: Iterable[str], index: jax.Array | int) -> Params:
        one = {name: jax.lax.dynamic_index_in_dim(stacked[name], index, keepdims=False) for name in names}
        return {
            name: gather_rows(value, SHARDS, platform) if specs[name] == SPLIT else value for name, value in one.items()
        }

    later = [name for name in stacked if name not in ahead]

    def step(carry: tuple[T, Params], index: jax.Array) -> tuple[tuple[T, Params], None]:
        hidden, early = carry
        weights = early | gathered(later, index)
        early = gathered(ahead, (index + 1) % depth)
        return (layer(hidden, weights, index), early), None

    return jax.lax.scan(step, (hidden, gathered(ahead, 0)), jnp.arange(depth))[0][0]


def linear(ops: Ops, weights: Params, name: str, x: Any, **more: Any) -> jax.Array:
    """Return what the linear layer of a name makes of rows, rounded first if they aren't and its weight is in 8 bits.

    x, more  as `wan_tpu_kernels.linear.linear` takes them
    """
    weight, scales = weights[f"{name}.weight"], weights.get(f"{name}.weight_scale")
    if scales is not None and not isinstance(x, Rounded):
        x = ops.round_rows(x, weight.dtype)
    return ops.linear(x, weight, weights[f"{name}.bias"], scales=scales, **more)


def rounded_to(weights: Params, name: str) -> Any:
    """Return the 8-bit type that the inputs of a linear layer are rounded to, None where its weight isn't in 8 bits."""
    return weights[f"{name}.weight"].dtype if f"{name}.weight_scale" in weights else None


def each(function: Callable[[Any], jax.Array], branches: Any) -> jax.Array:
    """Run branch after branch: activations take the room of one."""
    if jax.tree.leaves(branches)[0].shape[0] == 1:
        return function(jax.tree.map(lambda x: x[0], branches))[None]
    return jax.lax.map(function, branches)
