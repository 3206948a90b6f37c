"""Layers of a transformer inside a `jax.shard_map`; each layer's weights are gathered while earlier ones are in use."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from wan_tpu.ops.collectives import SplitWeight, gather_rows
from wan_tpu.ops.dispatch import Ops
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.mesh import SHARDS
from wan_tpu_kernels.low_precision import Rounded

T = TypeVar("T")  # One array, or several.
# How a large matrix, stacked over the layers, is split: its outputs over the devices of a branch.
SPLIT = P(None, SHARDS, None)
# The axes along which `scan_gathering_layers` gathers a matrix's parts. Where 'sp' splits only tokens, it holds copies.
_GATHERED: Mapping[P, tuple[str, ...]] = {SPLIT: SHARDS, P(None, "tp", None): ("tp",)}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class StackedWeight:
    """One layer's matrix within the array of all layers, from which `linear` reads it in place.

    It has no pytree leaves, so that barriers, loops and conditionals that pass on a layer's weights leave the array
    alone.
    """

    stack: jax.Array  # [depth, O, I].
    layer: jax.Array  # Int32 [].

    @property
    def dtype(self) -> Any:
        return self.stack.dtype


def scan_layers(
    layer: Callable[[T, Params, jax.Array], T],
    hidden_states: T,
    stacked: Params,
    specs: Mapping[str, P],
    *,
    depth: int,
    prefetched: Sequence[str],
    platform: str,
    linear_only: Collection[str] = (),
) -> T:
    """Run every layer on `hidden_states`.

    Args:
        layer: Takes (hidden_states, weights of the layer, its index) and returns hidden_states.
        stacked: This device's part of the weights, [depth, ...].
        specs: How the weights are split, by name. Those with `SPLIT` are gathered, and used only by `linear`: if
            nothing has to be gathered, the layer gets them as `StackedWeight`.
        prefetched: Names of weights that are gathered a layer early, because they are used before or right after the
            part that takes longest.
        platform: "tpu", "gpu" or "cpu".
        linear_only: Names of further matrices that only `linear` uses if each device has all weights. Otherwise XLA
            would copy the array of all layers' matrices if it prefers another layout for its own products (v7x).
    """
    axes = {name: SHARDS for name in stacked if specs[name] == SPLIT}

    def gather(names: Iterable[str], index: jax.Array | int) -> Params:
        weights = _take_layer(stacked, names, index)
        return {
            name: gather_rows(value, axes[name], platform) if name in axes else value for name, value in weights.items()
        }

    alone = math.prod(jax.lax.axis_size(axis) for axis in SHARDS) == 1
    in_place = [*_list_whole(axes), *(name for name in stacked if alone and name in linear_only and name not in axes)]
    prefetched = [name for name in prefetched if name not in in_place]
    later = [name for name in stacked if name not in (*prefetched, *in_place)]

    def step(carry: tuple[T, Params], index: jax.Array) -> tuple[tuple[T, Params], None]:
        hidden_states, early = carry
        weights: dict[str, Any] = early | gather(later, index)
        early = gather(prefetched, (index + 1) % depth)
        weights |= {name: StackedWeight(stacked[name], index) for name in in_place}
        return (layer(hidden_states, weights, index), early), None

    return jax.lax.scan(step, (hidden_states, gather(prefetched, 0)), jnp.arange(depth))[0][0]


def scan_gathering_layers(
    layer: Callable[[T, Params, Mapping[str, SplitWeight], jax.Array], tuple[T, Params]],
    hidden_states: T,
    stacked: Params,
    specs: Mapping[str, P],
    *,
    depth: int,
    prefetched: Sequence[str],
    platform: str,
) -> T:
    """Run every layer on `hidden_states`; each layer decides when its weights are gathered, and reads them in place.

    Args:
        layer: Takes hidden_states, the layer's weights, the next layer's weights that it must gather, and its index.
            Returns hidden_states and the gathered weights. It gets all other split weights as `SplitWeight`.
        hidden_states, stacked, specs, depth, platform: As for `scan_layers`.
        prefetched: Names of weights that the layer before gathers.
    """
    axes = _split_axes(stacked, specs)
    in_place = _list_whole(axes)
    split = [name for name in axes if name not in in_place]
    early = [name for name in split if name in prefetched]
    ungathered = [name for name in stacked if name not in axes]

    def describe(name: str, index: jax.Array) -> SplitWeight:
        return SplitWeight(stacked[name], index, axes[name], platform)

    def step(carry: tuple[T, Params], index: jax.Array) -> tuple[tuple[T, Params], None]:
        hidden_states, gathered = carry
        weights: dict[str, Any] = gathered | _take_layer(stacked, ungathered, index)
        weights |= {name: StackedWeight(stacked[name], index) for name in in_place}
        weights |= {name: describe(name, index) for name in split if name not in early}
        following = {name: describe(name, (index + 1) % depth) for name in early}
        return layer(hidden_states, weights, following, index), None

    first = {name: gather_rows(stacked[name], axes[name], platform, layer=0) for name in early}
    return jax.lax.scan(step, (hidden_states, first), jnp.arange(depth))[0][0]


def _split_axes(stacked: Params, specs: Mapping[str, P]) -> dict[str, tuple[str, ...]]:
    """Return the axes of each large matrix's parts, by name."""
    return {name: _GATHERED[specs[name]] for name in stacked if specs[name] in _GATHERED}


def _list_whole(axes: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names of matrices of which every device has a complete copy."""
    return [name for name, along in axes.items() if math.prod(map(jax.lax.axis_size, along)) == 1]


def _take_layer(stacked: Params, names: Iterable[str], index: jax.Array | int) -> Params:
    return {name: jax.lax.dynamic_index_in_dim(stacked[name], index, keepdims=False) for name in names}


def project_in_all_layers(stacked: Params, specs: Mapping[str, P], name: str, temb: jax.Array) -> jax.Array:
    """Return what the linear layer of a name makes of one vector in every layer, float32 [depth, O].

    This is a product with split matrices before all layers: its results are gathered, not the matrices.

    Args:
        stacked, specs: As for `scan_layers`.
        temb: [I].
    """
    weight, bias = stacked[f"{name}.weight"], stacked[f"{name}.bias"]
    product = jnp.einsum("loe,e->lo", weight, temb.astype(weight.dtype), preferred_element_type=jnp.float32)
    if specs[f"{name}.weight"] == SPLIT:
        product = jax.lax.all_gather(product, SHARDS, axis=1, tiled=True)
    return product + bias.astype(jnp.float32)


def linear(ops: Ops, weights: Params, name: str, rows: Any, **options: Any) -> jax.Array:
    """Apply the linear layer of a name to rows, which are rounded first if its weight is in 8 bits.

    Args:
        rows: As for `wan_tpu_kernels.linear.linear`, already rounded or not.
        **options: As for `wan_tpu_kernels.linear.linear`.
    """
    weight, scales = weights[f"{name}.weight"], weights.get(f"{name}.weight_scale")
    if scales is not None and not isinstance(rows, Rounded):
        rows = ops.round_rows(rows, weight.dtype)
    bias = weights.get(f"{name}.bias")
    if isinstance(weight, StackedWeight):
        return ops.linear(rows, weight.stack, bias, scales=scales, layer=weight.layer, **options)
    return ops.linear(rows, weight, bias, scales=scales, **options)


def in_float32() -> contextlib.AbstractContextManager[Any]:
    """Return the context in which products of float32 values are exact, whatever the precision of the model.

    Otherwise a TPU or a GPU rounds them, and keeping those weights in float32 would be pointless.
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
