"""A denoise step as github.com/yangwhale/gpu-tpu-pedia (3fa9ce1) runs it: diffusers' own transformer through torchax.

Weights are sharded over 'tp', activations over 'dp' by branch; XLA's partitioner does the rest. Attention is in
shard_map, heads over 'tp'; of a text's keys the queries are split instead. All lengths are padded to whole tiles, and
no key is masked, as there. Shapes: B branches, L tokens, N heads, D head width.
"""

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.runtime import bridge

TILE = (3328, 2816, 256)  # queries and keys of a tile, keys at once
HUNYUAN_TILE = (3072, 2048, 1024)
HUNYUAN_SPLASH = (3072, 2048, 512)  # 1,024 there: a compiler of 2026 finds 1 % too little VMEM for that
COLUMNS, ROWS = ("tp",), (None, "tp")
# What is sharded and how, by the name of a weight; all else is whole on every device.
WAN = {
    r"condition_embedder\.\w+_embedder\.linear_1\.(weight|bias)": COLUMNS,
    r"condition_embedder\.\w+_embedder\.linear_2\.weight": ROWS,
    r"blocks\.\d+\.attn[12]\.to_[qkv]\.(weight|bias)": COLUMNS,
    r"blocks\.\d+\.attn[12]\.to_out\.\d+\.weight": ROWS,
    r"blocks\.\d+\.ffn\.net\.\d+\.proj\.(weight|bias)": COLUMNS,
    r"blocks\.\d+\.ffn\.net\.\d+\.weight": ROWS,
}
# Of the MLP's first matrix the name that is given there matches nothing.
COGVIDEOX = {r".*\.to_[qkv]\.weight": ROWS, r".*\.to_out\.\d+\.weight": COLUMNS, r".*\.ff\.net\.2\.weight": COLUMNS}
# That program is Tencent's own, whose matrices these are in diffusers; the second of each pair is whole everywhere.
HUNYUAN = {
    r"transformer_blocks\.\d+\.attn\.to_[qkv]\.weight": COLUMNS,
    r"transformer_blocks\.\d+\.attn\.add_[qkv]_proj\.weight": COLUMNS,
    r"transformer_blocks\.\d+\.ff\.net\.0\.proj\.weight": COLUMNS,
    r"transformer_blocks\.\d+\.ff_context\.net\.0\.proj\.weight": COLUMNS,
}

Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q [N, Lq, D], k, v [N, Lk, D], whole tiles


@dataclass(frozen=True)
class Attention:
    """How attention is computed there.

    centred   keys less their mean
    by_token  whether the result is handed on by token, no longer by head
    """

    kernel: Kernel
    tile: tuple[int, int, int] = TILE
    centred: bool = True
    by_token: bool = False


def step(
    module: torch.nn.Module,
    shardings: Mapping[str, tuple[Any, ...]],
    mesh: Mesh,
    inputs: Mapping[str, Any],
    attention: Attention,
    forward: Callable[..., Any] | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return one call of a transformer and its arguments, `jax.ShapeDtypeStruct`s.

    module   on torch's meta device
    inputs   of `forward(module, **inputs)`, the module's own if none is given
    """

    def plain(module: torch.nn.Module, **inputs: Any) -> Any:
        return module(**inputs, return_dict=False)[0]

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    params = {name: _abstract(tensor, _spec(name, shardings), mesh) for name, tensor in tensors.items()}

    def run(params: dict[str, jax.Array], arguments: dict[str, jax.Array]) -> Any:
        bridge.torchax.default_env().override_op_definition(
            torch.nn.functional.scaled_dot_product_attention, functools.partial(_attend_sharded, mesh, attention)
        )
        return bridge.call(module, params, lambda model, arguments: (forward or plain)(model, **arguments), arguments)

    return run, (params, dict(inputs))


def hunyuan(
    module: Any, hidden_states: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Run a HunyuanVideo-1.5 transformer on texts that are embedded and in one row; their own embedders are left out.

    context [B, L, D], mask [B, L]
    """
    rotary, embedded = module.rope(hidden_states), module.time_embed(timestep)
    hidden_states = module.x_embedder(hidden_states)
    for block in module.transformer_blocks:
        hidden_states, context = block(hidden_states, context, embedded, mask, rotary)
    done: torch.Tensor = module.proj_out(module.norm_out(hidden_states, embedded))
    return done


def jax_splash(tile: tuple[int, int, int] = TILE) -> Kernel:
    """Return JAX's own splash attention."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = masks.MultiHeadMask([masks.FullMask((q.shape[1], k.shape[1])) for _ in range(q.shape[0])])
        blocks = splash.BlockSizes(block_q=tile[0], block_kv=tile[1], block_kv_compute=tile[2])
        return splash.make_splash_mha_single_device(mask, block_sizes=blocks)(q * q.shape[-1] ** -0.5, k, v)

    return attend


def exp2_splash(checkout: Path, tile: tuple[int, int, int] = TILE) -> Kernel:
    """Return that repository's own kernel, from a checkout of it; its inputs are float32, as there.

    256 keys are taken at once within a part.
    """
    module_spec = importlib.util.spec_from_file_location("exp2", checkout / "tpu/CogVideoX/custom_splash_attention.py")
    assert module_spec is not None and module_spec.loader is not None
    kernel = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(kernel)
    if not hasattr(kernel.pltpu, "repeat"):  # JAX has dropped it since
        kernel.pltpu.repeat = lambda x, times, axis: jnp.concatenate([x] * times, axis)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        sizes = kernel._BlockSizes(block_q=tile[0], block_kv=tile[1], block_kv_compute=tile[2])
        run = kernel.make_splash_mha(block_sizes=sizes, bkv_compute_in=256)
        scaled = q * (q.shape[-1] ** -0.5 * 1.44269504)
        return run(*(x.astype(jnp.float32) for x in (scaled, k, v))).swapaxes(1, 2).astype(q.dtype)

    return attend


def _spec(name: str, shardings: Mapping[str, tuple[Any, ...]]) -> P:
    return P(*next((spec for pattern, spec in shardings.items() if re.fullmatch(pattern, name)), ()))


def _abstract(tensor: torch.Tensor, spec: P, mesh: Mesh) -> jax.ShapeDtypeStruct:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=NamedSharding(mesh, spec))


def _attend_sharded(mesh: Mesh, attention: Attention, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """scaled_dot_product_attention of torch tensors [B, N, L, D]."""
    q, k, v = bridge.to_jax((query, key, value))
    if attention.centred:
        k = k - k.mean(axis=2, keepdims=True)
    if q.shape[2] == k.shape[2]:
        rows = keys = P("dp", "tp", None, None)
    else:
        rows, keys = P("dp", None, "tp", None), P("dp", None, None, None)

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        of_queries, of_keys, _ = attention.tile
        padded = (_pad(q, of_queries), _pad(k, of_keys), _pad(v, of_keys))
        return jax.vmap(attention.kernel)(*padded)[:, :, : q.shape[2]].astype(q.dtype)

    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, keys, keys), out_specs=rows, check_vma=False)
    out = run(q, k, v)
    if attention.by_token:
        out = jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P("dp", None, "tp", None)))
    return bridge.to_torch(out)


def _pad(x: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % tile), (0, 0)))
