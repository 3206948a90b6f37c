"""The transformer that decodes MiniMax-H3's video: tiles of latents to tiles of pixels, as in diffusers.

Each pixel of the latents is a token. A tile's tokens are followed by the learned registers, a token of zeros, and
padding that isn't looked at. All tokens of a device's tiles are the rows of one array; only attention knows the tiles.
As in diffusers, the sums of the layers stay in float32.

Shapes: N tiles, T h w latent frames, height and width of a tile, L tokens of a tile with padding, C channels of the
latents, D head width, S channels of the tokens.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.families.shared.layers import linear
from wan_tpu.ops.attention import attention, query_scale
from wan_tpu.ops.dispatch import ops_for
from wan_tpu.runtime.bridge import Params

_BLOCKS = "decoder.transformer_blocks.template."
# A tile's tokens are padded to whole registers of bfloat16, so that tiles follow each other in rows without a copy.
_UNIT = 16


def decode_tiles(vae: Mapping[str, Any], params: Params, latents: jax.Array, platform: str) -> jax.Array:
    """Return the pixels [N, 3, 4T, 16h, 16w] of latents [N, C, T, h, w].

    Args:
        vae: The VAE's configuration.
        params: Its weights.
        latents: The tiles, as `post_quant_conv` leaves them.
        platform: "tpu", "gpu" or "cpu".
    """
    tiles, _, *grid = latents.shape
    tokens = math.prod(grid)
    keys = tokens + vae["decoder_num_register_tokens"] + 1
    padded = -(-keys // _UNIT) * _UNIT
    ops, eps, dtype = ops_for(platform), vae["decoder_norm_eps"], latents.dtype
    heads, width = vae["decoder_num_attention_heads"], vae["decoder_attention_head_dim"]
    rotary_emb = [jnp.tile(jnp.asarray(table), (tiles, 1)) for table in _rotations(vae, grid, padded)]

    def normalise(rows: jax.Array, weight: jax.Array) -> jax.Array:
        shift = jnp.zeros((1, rows.shape[1]))
        normed: jax.Array = ops.layer_norm(rows, weight[None], shift, eps=eps, centred=False, dtype=dtype)
        return normed

    def project(weights: Params, name: str, rows: jax.Array, **options: Any) -> jax.Array:
        return linear(ops, weights, name, rows, **options)

    def rotate(rows: jax.Array, scale: float) -> jax.Array:
        return ops.head_norm_rope(rows, jnp.full(width, scale, jnp.float32), None, rotary_emb, eps=eps)

    def add(weights: Params, name: str, scale: str, rows: jax.Array, residual: jax.Array) -> jax.Array:
        return project(weights, name, rows, residual=residual, gate=weights[scale][None], dtype=residual.dtype)

    def block(hidden_states: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        normed = normalise(hidden_states, weights["norm1.weight"])
        query = rotate(project(weights, "attn.to_q", normed), query_scale(width))
        key, value = rotate(project(weights, "attn.to_k", normed), 1), project(weights, "attn.to_v", normed)
        query, key, value = (part.reshape(tiles, padded, -1) for part in (query, key, value))
        attended = attention(query, key, value, heads=heads, platform=platform, kv_len=keys)
        hidden_states = add(
            weights, "attn.to_out.0", "scale1", attended.reshape(tiles * padded, -1), residual=hidden_states
        )
        inner = project(
            weights, "ff.net.0.proj", normalise(hidden_states, weights["norm2.weight"]), activation="swiglu"
        )
        return add(weights, "ff.net.2", "scale2", inner, residual=hidden_states), None

    stacked = {name.removeprefix(_BLOCKS): value for name, value in params.items() if name.startswith(_BLOCKS)}
    hidden_states, _ = jax.lax.scan(block, _embed(params, latents, padded).reshape(tiles * padded, -1), stacked)
    scale, shift = (params[f"decoder.norm_out.{part}"][None] for part in ("weight", "bias"))
    normed = ops.layer_norm(hidden_states, scale, shift, eps=eps, dtype=dtype)
    patches = project(params, "decoder.proj_out", normed).reshape(tiles, padded, -1)[:, :tokens]
    return _unpack(patches, vae, grid)


def _embed(params: Params, latents: jax.Array, padded: int) -> jax.Array:
    """Return the tokens of tiles of latents, the registers and zeros, float32 [N, L, S]."""
    weight, bias = params["decoder.proj_in.weight"], params["decoder.proj_in.bias"]
    registers = params["decoder.register_tokens"].astype(jnp.float32)
    tokens = jnp.einsum("nctyx,sc->ntyxs", latents, weight, preferred_element_type=jnp.float32)
    tokens = tokens.reshape(len(latents), -1, len(weight)) + bias.astype(jnp.float32)
    rows = jnp.concatenate([tokens, jnp.broadcast_to(registers, (len(latents), *registers.shape[1:]))], axis=1)
    return jnp.pad(rows, ((0, 0), (0, padded - rows.shape[1]), (0, 0)))


def _rotations(vae: Mapping[str, Any], grid: list[int], padded: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of a tile's tokens, float32 [L, D], as our kernels take them.

    Positions run from -1 to 1 over a tile, whatever its size. Channels that aren't rotated have the angle zero, and so
    have the tokens behind the tile's own.
    """
    width = vae["decoder_attention_head_dim"]
    rotated = int(width * vae["decoder_rope_dim_ratio"])
    exponents = np.arange(0, 1, 6 / rotated, dtype=np.float32)
    frequencies = np.float32(1) / np.power(np.float32(vae["decoder_rope_theta"]), exponents)
    axes = [2 * (np.arange(0.5, size, dtype=np.float32) / np.float32(size)) - 1 for size in grid]
    positions = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
    angles = np.zeros((padded, width // 2), np.float32)
    phases = np.float32(2 * math.pi) * positions[:, :, None] * frequencies
    angles[: len(phases), : rotated // 2] = phases.reshape(len(phases), -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)


def _unpack(patches: jax.Array, vae: Mapping[str, Any], grid: list[int]) -> jax.Array:
    """Turn the channels of tokens [N, T h w, 3 * 4 * 16 * 16] into pixels [N, 3, 4T, 16h, 16w]."""
    tiles, (frames, height, width) = len(patches), grid
    time, size = math.prod(vae["temporal_downsample_factors"]), math.prod(vae["spatial_downsample_factors"])
    parts = patches.reshape(tiles, frames, height, width, -1, time, size, size)
    return parts.transpose(0, 4, 1, 5, 2, 6, 3, 7).reshape(tiles, -1, frames * time, height * size, width * size)
