"""Linear attention with a softmax over channels: the part of sparse-linear attention (SLA) that sees every key.

With phi(x) = softmax(x) over the D channels of a head, and eps = 1e-5,

    out_i = P [ phi(q_i) sum_j phi(k_j)^T v_j / (eps + phi(q_i) . sum_j phi(k_j)) ] + b,

where P [D, D] and b [D] are trained (arXiv 2509.24006, `proj_l`). The sums over the keys don't depend on the query, so
they are computed once (`_summarise_keys`), P is multiplied into them, and a second kernel adds the result to the sparse
part (`add_linear`). In that fraction phi(q) needs no sum of its own: with e = exp(q - max q), numerator and denominator
are both divided by sum(e), provided that eps is added to sum_j phi(k_j). Both kernels read and write each array once.

Shapes: L tokens, N heads, D head width, S heads that share 128 lanes; token-major, [L, N * D].
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wan_tpu_kernels.blocks import LANES
from wan_tpu_kernels.flash_kernel import Ref, dot
from wan_tpu_kernels.sparse_attention import first_tiles

EPSILON = 1e-5
ROWS = 1024  # Rows of a grid step.


def add_linear(
    sparse: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    heads: int,
    first_heads: tuple[int, int, int] = (0, 0, 0),
    scale: float = 1.0,
    kv_len: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Add linear attention to sparse attention's result.

    Args:
        sparse: [Lq, N * D]. All arrays are bfloat16 or all are float32. D is a multiple of 128, or divides 128 if N * D
            is a multiple of 128.
        q: [Lq, N * D]. q, k and v may hold more heads, as in `sparse_attention`.
        k, v: [Lk, N * D].
        weight: [D (out), D (in)].
        bias: [D].
        heads: N.
        first_heads: The first head to use of q, k and v.
        scale: The factor of q: the inverse of attention's scale if that was folded into q.
        kv_len: Number of real keys; the rest of K and V is never read.
        interpret: As for `pallas_call`.

    Raises:
        ValueError: D is another width.
    """
    width, rows = sparse.shape[1] // heads, min(ROWS, -(-q.shape[0] // 8) * 8)
    first_q, first_k, first_v = first_tiles(first_heads, heads, width)
    tile = _Tile(width, LANES // width if width < LANES else 1, kv_len or k.shape[0], scale)
    tiles = sparse.shape[1] // tile.lanes
    values, keys = _summarise_keys(k, v, tile, tiles, (first_k, first_v), interpret)
    sums = _fold_keys(values, keys, weight, tile).astype(q.dtype)
    row = jnp.tile(bias.astype(jnp.float32), tile.shared)[None]
    tokens = pl.BlockSpec((rows, tile.lanes), lambda t, i: (i, t))
    return pl.pallas_call(
        functools.partial(_add_kernel, tile=tile),
        grid=(tiles, -(-q.shape[0] // rows)),
        in_specs=[
            tokens,
            pl.BlockSpec((rows, tile.lanes), lambda t, i: (i, first_q + t)),
            pl.BlockSpec((None, tile.lanes, 2 * tile.lanes), lambda t, i: (t, 0, 0)),
            pl.BlockSpec((1, tile.lanes), lambda t, i: (0, 0)),
        ],
        out_specs=tokens,
        out_shape=jax.ShapeDtypeStruct(sparse.shape, sparse.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=4 * sparse.size * tile.lanes,
            transcendentals=sparse.size,
            bytes_accessed=3 * sparse.size * q.dtype.itemsize,
        ),
        interpret=interpret,
        name="linear_attention",
    )(sparse, q, sums, row)


def add_linear_reference(
    sparse: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    heads: int,
    scale: float = 1.0,
    kv_len: int | None = None,
) -> jax.Array:
    """Compute the same as `add_linear` in plain jnp, float32, straight from the formula."""
    q3, k3, v3 = (x.astype(jnp.float32).reshape(len(x), heads, -1) for x in (q, k[:kv_len], v[:kv_len]))
    q3, k3 = jax.nn.softmax(q3 * scale), jax.nn.softmax(k3)
    values = jnp.einsum("knd,kne->nde", k3, v3, precision="highest")
    denominator = EPSILON + jnp.einsum("qnd,nd->qn", q3, k3.sum(0), precision="highest")
    out = jnp.einsum("qnd,nde->qne", q3, values, precision="highest") / denominator[..., None]
    out = jnp.einsum("qne,fe->qnf", out, weight.astype(jnp.float32), precision="highest") + bias
    return (sparse + out.reshape(q.shape)).astype(sparse.dtype)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The static settings of the kernels.

    Attributes:
        width: D.
        shared: S.
        kv_len: Number of real keys.
        scale: The factor of q.
    """

    width: int
    shared: int
    kv_len: int
    scale: float

    @property
    def lanes(self) -> int:
        return self.width * self.shared

    def own_lanes(self, shape: tuple[int, ...]) -> list[jax.Array]:
        """Return a mask of the lanes of each head of a tile."""
        lane = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        return [(lane >= i * self.width) & (lane < (i + 1) * self.width) for i in range(self.shared)]

    def powers(self, x: jax.Array) -> jax.Array:
        """Return exp(rows [L, S D] - each head's largest channel)."""
        if self.shared == 1:
            return jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
        masks = self.own_lanes(x.shape)
        largest = [jnp.max(jnp.where(mask, x, -jnp.inf), axis=1, keepdims=True) for mask in masks]
        return jnp.exp(x - sum(jnp.where(mask, maximum, 0.0) for mask, maximum in zip(masks, largest, strict=True)))

    def sums(self, x: jax.Array) -> jax.Array:
        """Return each head's sum over its channels of rows [L, S D], in all of its lanes."""
        if self.shared == 1:
            return jnp.sum(x, axis=1, keepdims=True)
        masks = self.own_lanes(x.shape)
        parts = [jnp.where(mask, jnp.sum(jnp.where(mask, x, 0.0), axis=1, keepdims=True), 0.0) for mask in masks]
        return sum(parts, start=jnp.zeros_like(x))


def _summarise_keys(
    k: jax.Array, v: jax.Array, tile: _Tile, tiles: int, first: tuple[int, int], interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Return sum_j phi(k_j)^T v_j [tiles, S D, S D] and sum_j phi(k_j) [tiles, 1, S D].

    Heads that share a tile are multiplied with one another, too; `_fold_keys` drops those products.
    """
    rows, work = min(ROWS, -(-k.shape[0] // 8) * 8), k.shape[0] * tiles * tile.lanes
    keys = pl.BlockSpec((rows, tile.lanes), lambda t, i: (i, first[0] + t))
    values = pl.BlockSpec((rows, tile.lanes), lambda t, i: (i, first[1] + t))
    return pl.pallas_call(
        functools.partial(_summary_kernel, tile=tile),
        grid=(tiles, -(-tile.kv_len // rows)),
        in_specs=[keys, values],
        out_specs=[
            pl.BlockSpec((None, tile.lanes, tile.lanes), lambda t, i: (t, 0, 0)),
            pl.BlockSpec((None, 1, tile.lanes), lambda t, i: (t, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((tiles, tile.lanes, tile.lanes), jnp.float32),
            jax.ShapeDtypeStruct((tiles, 1, tile.lanes), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * work * tile.lanes, transcendentals=work, bytes_accessed=2 * work * k.dtype.itemsize
        ),
        interpret=interpret,
        name="linear_attention_keys",
    )(k, v)


def _summary_kernel(k_ref: Ref, v_ref: Ref, values_ref: Ref, keys_ref: Ref, *, tile: _Tile) -> None:
    """Run one grid step (t, i)."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        values_ref[...] = jnp.zeros_like(values_ref)
        keys_ref[...] = jnp.zeros_like(keys_ref)

    k, v = k_ref[...].astype(jnp.float32), v_ref[...]
    real = tile.kv_len - pl.program_id(1) * k.shape[0]
    if tile.kv_len % k.shape[0]:  # Rows after the last key may be NaN.
        is_key = lax.broadcasted_iota(jnp.int32, k.shape, 0) < real
        k, v = jnp.where(is_key, k, 0.0), jnp.where(is_key, v, jnp.zeros_like(v))
    powers = tile.powers(k)
    phi = powers / tile.sums(powers)
    if tile.kv_len % k.shape[0]:
        phi = jnp.where(is_key, phi, 0.0)
    values_ref[...] += dot(phi.astype(v.dtype), v, contract=(0, 0))
    keys_ref[...] += jnp.sum(phi, axis=0, keepdims=True)


def _fold_keys(values: jax.Array, keys: jax.Array, weight: jax.Array, tile: _Tile) -> jax.Array:
    """Return [tiles, S D, 2 S D]: the factors of e for the numerator (with P folded in) and for the denominator."""
    same = jnp.kron(jnp.eye(tile.shared), jnp.ones((tile.width, tile.width)))
    projected = jnp.kron(jnp.eye(tile.shared), weight.astype(jnp.float32).T)
    numerator = jnp.einsum("tde,ef->tdf", values * same, projected, precision="highest")
    denominator = (keys + EPSILON).swapaxes(1, 2) * same
    return jnp.concatenate([numerator, denominator], axis=2)


def _add_kernel(sparse_ref: Ref, q_ref: Ref, folded_ref: Ref, bias_ref: Ref, out_ref: Ref, *, tile: _Tile) -> None:
    """Run one grid step (t, i)."""
    powers = tile.powers(q_ref[...].astype(jnp.float32) * tile.scale)
    both = dot(powers.astype(folded_ref.dtype), folded_ref[...], contract=(1, 0))
    linear = both[:, : tile.lanes] / both[:, tile.lanes :] + bias_ref[...]
    out_ref[...] = (sparse_ref[...].astype(jnp.float32) + linear).astype(out_ref.dtype)
