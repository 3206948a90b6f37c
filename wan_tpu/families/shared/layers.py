"""Layers of a transformer inside a `jax.shard_map`; each layer's weights are gathered while earlier ones are in use."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from wan_tpu.ops.collectives import gather_rows
from wan_tpu.ops.dispatch import Ops
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.mesh import SHARDS
from wan_tpu_kernels.low_precision import Rounded

T = TypeVar("T")  # One array, or several.
# How a large matrix, stacked over the layers, is split: its outputs over the devices of a branch.
SPLIT = P(None, SHARDS, None)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class StackedWeight:
    """One layer's matrix in the array of all layers', from which `linear` reads it in place.

    It has no leaves, so that barriers, loops and conditionals that pass a layer's weights on leave the array alone.

    Attributes:
        stack: [depth, O, I].
        layer: int32 [].
    """

    stack: jax.Array
    layer: jax.Array

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.stack.dtype


def scan_layers(
    layer: Callable[[T, Params, jax.Array], T],
    hidden: T,
    stacked: Params,
    specs: Mapping[str, P],
    *,
    depth: int,
    ahead: Sequence[str],
    platform: str,
    linear_only: Collection[str] = (),
) -> T:
    """Run every layer on `hidden`.

    Args:
        layer: Takes (hidden, weights of the layer, its index) and returns hidden.
        hidden: The input of the first layer.
        stacked: This device's part of the weights, [depth, ...].
        specs: How the weights are split, by name. Those with `SPLIT` are used by `linear` alone: where nothing has to
            be gathered, the layer gets them as `StackedWeight`.
        depth: Number of layers.
        ahead: Names of weights that are gathered a layer early, because they are used before or right after the part
            that takes longest.
        platform: "tpu", "gpu" or "cpu".
        linear_only: Names of further matrices that are used by `linear` alone where each device has all weights. XLA
            would copy the array of all layers' matrices where it prefers another layout for its own products (v7x).
    """

    def gather(names: Iterable[str], index: jax.Array | int) -> Params:
        weights = {name: jax.lax.dynamic_index_in_dim(stacked[name], index, keepdims=False) for name in names}
        return {
            name: gather_rows(value, SHARDS, platform) if specs[name] == SPLIT else value
            for name, value in weights.items()
        }

    alone = math.prod(jax.lax.axis_size(axis) for axis in SHARDS) == 1
    in_place = [name for name in stacked if alone and (specs[name] == SPLIT or name in linear_only)]
    ahead = [name for name in ahead if name not in in_place]
    later = [name for name in stacked if name not in (*ahead, *in_place)]

    def step(carry: tuple[T, Params], index: jax.Array) -> tuple[tuple[T, Params], None]:
        hidden, early = carry
        weights: dict[str, Any] = early | gather(later, index)
        early = gather(ahead, (index + 1) % depth)
        weights |= {name: StackedWeight(stacked[name], index) for name in in_place}
        return (layer(hidden, weights, index), early), None

    return jax.lax.scan(step, (hidden, gather(ahead, 0)), jnp.arange(depth))[0][0]


def linear(ops: Ops, weights: Params, name: str, x: Any, **options: Any) -> jax.Array:
    """Apply the linear layer of a name to rows, which are rounded first if its weight is in 8 bits.

    Args:
        ops: The platform's operations.
        weights: The weights of a transformer's layer.
        name: The linear layer's.
        x: As for `wan_tpu_kernels.linear.linear`, already rounded or not.
        **options: As for `wan_tpu_kernels.linear.linear`.
    """
    weight, scales = weights[f"{name}.weight"], weights.get(f"{name}.weight_scale")
    if scales is not None and not isinstance(x, Rounded):
        x = ops.round_rows(x, weight.dtype)
    bias = weights.get(f"{name}.bias")
    if isinstance(weight, StackedWeight):
        return ops.linear(x, weight.stack, bias, scales=scales, layer=weight.layer, **options)
    return ops.linear(x, weight, bias, scales=scales, **options)


def in_float32() -> contextlib.AbstractContextManager[Any]:
    """Return the context in which products of float32 values are exact, whatever the precision of the model.

    Else a TPU or a GPU rounds them, and keeping those weights in float32 would be in vain.
    """
    return jax.default_matmul_precision("highest")


def rounded_type(weights: Params, name: str) -> Any:
    """Return the 8-bit type that a linear layer's inputs are rounded to, or None if its weight isn't in 8 bits."""
    return weights[f"{name}.weight"].dtype if f"{name}.weight_scale" in weights else None


def map_branches(function: Callable[[Any], jax.Array], branches: Any) -> jax.Array:
    """Run one branch after the other, so that activations take the memory of one."""
    if jax.tree.leaves(branches)[0].shape[0] == 1:
        return function(jax.tree.map(lambda x: x[0], branches))[None]
    return jax.lax.map(function, branches)
