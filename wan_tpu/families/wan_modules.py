"""Pieces of diffusers' Wan modules that are replaced for XLA. Parameter names stay the checkpoint's.

Shapes: B batch, T frames, H W height and width, L tokens, N heads, D head width, C channels.
"""

import jax
import jax.numpy as jnp
import torch
from diffusers.models.transformers.transformer_wan import WanAttention
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.attention import attention
from wan_tpu.bridge import to_jax, to_torch
from wan_tpu.mesh import activation_axes

TEXT_TOKENS = 512  # WanAttention's own constant: what precedes them are image tokens


def adapt_transformer(module: torch.nn.Module, mesh: Mesh) -> None:
    """Give every attention of a WanTransformer3DModel the processor below."""
    for child in module.modules():
        if isinstance(child, WanAttention):
            child.set_processor(WanProcessor(mesh))


class WanProcessor:
    """Wan's self- and cross-attention over `wan_tpu.attention`, RoPE in one fused expression."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """hidden_states [B, L, C], encoder_hidden_states [B, (257 +) 512, C] -> [B, L, C]."""
        hidden = self._by_token(hidden_states)
        context = hidden if encoder_hidden_states is None else encoder_hidden_states
        image = None
        if attn.add_k_proj is not None:
            image, context = context[:, :-TEXT_TOKENS], context[:, -TEXT_TOKENS:]
        query = self._heads(attn, attn.norm_q(attn.to_q(hidden)))
        key = self._heads(attn, attn.norm_k(attn.to_k(context)))
        value = self._heads(attn, attn.to_v(context))
        if rotary_emb is not None:
            cos, sin = (to_jax(table) for table in rotary_emb)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = attention(query, key, value, self._mesh)
        if image is not None:
            image_key = self._heads(attn, attn.norm_added_k(attn.add_k_proj(image)))
            mixed = mixed + attention(query, image_key, self._heads(attn, attn.add_v_proj(image)), self._mesh)
        batch, length = mixed.shape[:2]
        return attn.to_out[0](to_torch(mixed.reshape(batch, length, -1)))

    def _by_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """Lay the token stream over the mesh: batch on 'dp', tokens on 'sp'."""
        array = to_jax(hidden)
        batch, tokens = activation_axes(self._mesh, array.shape[0], array.shape[1])
        return to_torch(jax.lax.with_sharding_constraint(array, NamedSharding(self._mesh, P(batch, tokens, None))))

    @staticmethod
    def _heads(attn: WanAttention, projected: torch.Tensor) -> jax.Array:
        """[B, L, N*D] -> [B, L, N, D]."""
        array = to_jax(projected)
        return array.reshape(*array.shape[:2], attn.heads, -1)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of interleaved pairs, in float32; x [B, L, N, D], cos and sin [1, L, 1, D]."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    swapped = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
    return (x * cos + swapped * sin).astype(x.dtype)
