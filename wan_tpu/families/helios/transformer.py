"""A Helios transformer: Wan's, which sees the frames before a chunk as additional tokens.

Distant frames share tokens: a token covers four times as much in each direction as one of the chunk, then twice as
much. All these tokens follow the chunk's. They have the timestep 0, take nothing from the text, and if the model was
trained that way, their keys are scaled per head. Everything else is Wan's `WanStep`.

Shapes: B branches of guidance, T H W latent frames, height, width, L tokens, t tokens of one device, N heads, D head
width, C = N*D channels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh

from wan_tpu.families.helios.chunks import LONG, MID, SHORT
from wan_tpu.families.shared.layers import linear
from wan_tpu.families.shared.tokens import pad_rows, patchify
from wan_tpu.families.wan.text_keys import TextKeys
from wan_tpu.families.wan.transformer import WanInputs, WanStep, embed_time, head_modulation
from wan_tpu.ops.dispatch import ops_for
from wan_tpu.runtime.bridge import Params, call, collect_linear, to_jax
from wan_tpu.runtime.mesh import token_layout
from wan_tpu_kernels.columns import Columns

# If there are fewer queries than a block, attention pads them to a multiple of `QUERY_ROWS`, which would copy them.
QUERY_ROWS, BLOCK_ROWS = 256, 8192
LARGEST_SCALE = 10.0  # Of history keys, a constant of diffusers' module.
# The history by distance, with the module that embeds it and the size of its patches in the chunk's.
_EMBEDDINGS = ((LONG, "patch_long", 4), (MID, "patch_mid", 2), (SHORT, "patch_short", 1))


def velocity(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    latents: jax.Array,
    timestep: jax.Array,
    history: Mapping[str, jax.Array],
    rotary_emb: tuple[jax.Array, jax.Array],
    text_keys: TextKeys,
) -> jax.Array:
    """Return each branch's velocity as tokens, float32 [B, L, patch values].

    Args:
        latents: [1, C, T, H, W] of the chunk, in the dtype to compute in.
        timestep: [], the timestep.
        history: From `chunks.make_history`, in the same dtype.
        rotary_emb: From `positions.rotary_tables`.
        text_keys: From Wan's `text_keys`; their B is the number of branches.
    """

    def method(module: Any, latents: Any, timesteps: torch.Tensor, history: Any, text_keys: Any) -> jax.Array:
        temb, timestep_proj = embed_time(module, timesteps, latents.dtype)
        before = [_embed(module, name, to_jax(history[key]), scale) for key, name, scale in _EMBEDDINGS]
        chunk = _embed(module, "patch_embedding", to_jax(latents), 1)
        tokens, count = jnp.concatenate([chunk, *before]), len(chunk)
        block = QUERY_ROWS if mesh.devices.flat[0].platform == "tpu" and len(tokens) < BLOCK_ROWS else 1
        layout = token_layout(mesh, text_keys["key"].shape[1], len(tokens), module.config.num_attention_heads, block)
        velocities, _ = HistoryStep(module, mesh, layout, count, len(tokens)).run(
            WanInputs(
                tokens=pad_rows(tokens, layout.padded),
                rotary_emb=tuple(pad_rows(table, layout.padded) for table in rotary_emb),
                timestep_proj=to_jax(timestep_proj).astype(jnp.float32),
                head=head_modulation(module.norm_out, temb).astype(jnp.float32),
                text_keys=to_jax(text_keys),
                blocks=to_jax(dict(module.blocks.template.named_parameters())),
                other_weights=collect_linear(proj_out=module.proj_out),
            )
        )
        return velocities[:, :count]

    timesteps = jnp.stack([timestep, jnp.zeros_like(timestep)])
    return call(module, params, method, latents, timesteps, dict(history), text_keys)


def _embed(module: Any, name: str, latents: jax.Array, scale: int) -> jax.Array:
    """Return latents as tokens [L, C] in patches `scale` times as large as the chunk's.

    It isn't sharded: that is a ten-thousandth of a step's work.
    """
    patch: Sequence[int] = [scale * size for size in module.config.patch_size]
    padding = [(0, -n % p) for n, p in zip(latents.shape[2:], patch, strict=True)]
    values = patchify(jnp.pad(latents, ((0, 0), (0, 0), *padding), mode="edge"), patch)
    return linear(ops_for("cpu"), collect_linear(**{name: getattr(module, name)}), name, values)


class HistoryStep(WanStep):
    """One step's blocks; the first rows belong to the chunk, the others to the history."""

    def embed(self, inputs: WanInputs) -> jax.Array:
        """Return the hidden state before the first layer, [t, C]: the tokens, which have been embedded."""
        return inputs.tokens

    def scale_keys(self, keys: tuple[jax.Array, ...], weights: Params, first_rows: jax.Array) -> tuple[jax.Array, ...]:
        """Return the keys of self-attention, with the history's keys scaled if the model was trained that way."""
        if "attn1.history_gain" not in weights:
            return keys
        factors = 1 + jax.nn.sigmoid(weights["attn1.history_gain"].astype(jnp.float32)) * (LARGEST_SCALE - 1)
        columns = Columns(sum(part.shape[-1] for part in keys) * self._groups, self._groups, self._key_parts)
        cut = columns.cut(jnp.repeat(factors, columns.channels // self._heads)[None])
        row = jnp.arange(keys[0].shape[-2])[:, None]
        return tuple(
            (key * jnp.where(row < first_rows, 1, part)).astype(key.dtype) for key, part in zip(keys, cut, strict=True)
        )

    def text_gate(self, channels: int, first_rows: jax.Array) -> dict[str, Any]:
        """Return the options of `linear` that stop text from affecting the history."""
        gate = jnp.broadcast_to(jnp.array([[1.0], [0.0]], jnp.float32), (2, channels))
        return {"gate": gate, "first_rows": first_rows}

    def attend_to_text(
        self,
        hidden_states: jax.Array,
        text_keys: TextKeys,
        weights: Params,
        first_rows: jax.Array,
        *,
        rows: int | None = None,
    ) -> jax.Array:
        """Return the hidden state after cross-attention, which is only for the chunk if one device has all tokens."""
        chunk = -(-self._first // QUERY_ROWS) * QUERY_ROWS
        rows = chunk if chunk < len(hidden_states) == self._layout.padded else None
        return super().attend_to_text(hidden_states, text_keys, weights, first_rows, rows=rows)
