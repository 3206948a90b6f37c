"""The sound's stream of an LTX-2 transformer, inside the `jax.shard_map` of `../transformer.py`.

Every device has all tokens of the sound, and its own heads and hidden units of the weights ('tp'). There are so few
tokens that plain XLA is as good as kernels. But where each device has all weights, kernels read large ones in place.

Shapes: A tokens of the sound, S tokens of a text, t tokens of the video on one device, N heads, D head width, n columns
of a device's heads.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from wan_tpu.families.shared.layers import StackedWeight, linear
from wan_tpu.ops.attention import attention, query_scale
from wan_tpu.ops.dispatch import ops_for
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.mesh import TokenLayout


@dataclass(frozen=True)
class SoundStream:
    """One step's layers of the sound's stream.

    Attributes:
        config: The transformer's configuration.
        mesh: The devices.
        layout: How the video's tokens are laid out on them.
        tokens: The number of the video's tokens.
        platform: "tpu", "gpu" or "cpu".
        rotary_emb: This device's columns of cosines and sines [A, n], for attention to itself and to the video.
        start: The first of this device's tokens of the video.
    """

    config: Any
    mesh: Mesh
    layout: TokenLayout
    tokens: int
    platform: str
    rotary_emb: dict[str, tuple[jax.Array, jax.Array]] | None = None
    start: jax.Array | int = 0

    def on_device(self, rotary_emb: dict[str, jax.Array], start: jax.Array) -> "SoundStream":
        """Return the stream with what this device knows: its heads' angles, and where its tokens begin."""
        own = {name: tuple(self._own_columns(part) for part in rotary_emb[name]) for name in ("audio", "cross_audio")}
        return SoundStream(self.config, self.mesh, self.layout, self.tokens, self.platform, own, start)  # type: ignore[arg-type]

    @property
    def _width(self) -> int:
        return int(self.config.audio_attention_head_dim)

    @property
    def _parts(self) -> int:
        """How many devices split the heads."""
        return math.gcd(self.mesh.shape["tp"], int(self.config.audio_num_attention_heads))

    def _own_columns(self, x: jax.Array) -> jax.Array:
        """Return this device's part of columns [..., N*D]."""
        size = x.shape[-1] // self._parts
        if self._parts == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tp") * size, size, axis=-1)

    def _gather_columns(self, x: jax.Array) -> jax.Array:
        """Return the columns of all devices, [..., N*D]."""
        return x if self._parts == 1 else jax.lax.all_gather(x, "tp", axis=x.ndim - 1, tiled=True)

    def _sum(self, x: jax.Array) -> jax.Array:
        return x if self._parts == 1 else jax.lax.psum(x, "tp")

    def attend_to_itself(self, hidden_states: jax.Array, weights: Params, perturbed: jax.Array | None) -> jax.Array:
        """Return the tokens after self-attention, or with unmixed values where it is perturbed."""
        modulation, name = weights["modulation.audio"][0], "audio_attn1"
        rows = self._normalise(hidden_states, modulation[1], modulation[0])
        values = self._project(weights, f"{name}.to_v", rows)
        queries = self._rotate(weights, f"{name}.to_q", f"{name}.norm_q", rows, "audio", query_scale(self._width))
        keys = self._rotate(weights, f"{name}.to_k", f"{name}.norm_k", rows, "audio", 1)
        attended = self._attend(queries, keys, values)
        if perturbed is not None:
            attended = jnp.where(perturbed, values, attended)
        return self._add(weights, name, self._gate_heads(weights, name, rows, attended), hidden_states, modulation[2])

    def text_keys(self, weights: Params, encoder_hidden_states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values of one text, [S, n] each."""
        if "modulation.audio_text" in weights:
            shift, scale = weights["modulation.audio_text"][0]
            encoder_hidden_states = (encoder_hidden_states.astype(jnp.float32) * (1 + scale) + shift).astype(
                encoder_hidden_states.dtype
            )
        keys = self._rotate(weights, "audio_attn2.to_k", "audio_attn2.norm_k", encoder_hidden_states, None, 1)
        return keys, self._project(weights, "audio_attn2.to_v", encoder_hidden_states)

    def attend_to_text(self, hidden_states: jax.Array, weights: Params, keys: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return the tokens after attention to a text."""
        modulation, name = weights["modulation.audio"][0], "audio_attn2"
        none = jnp.zeros(hidden_states.shape[1], jnp.float32)
        shift, scale, gate = modulation[6:9] if len(modulation) > 6 else (none, none, none + 1)
        rows = self._normalise(hidden_states, scale, shift)
        queries = self._rotate(weights, f"{name}.to_q", f"{name}.norm_q", rows, None, query_scale(self._width))
        return self._add(
            weights, name, self._gate_heads(weights, name, rows, self._attend(queries, *keys)), hidden_states, gate
        )

    def keys_for_video(self, hidden_states: jax.Array, weights: Params) -> tuple[jax.Array, jax.Array]:
        """Return the sound's keys and values for the video's queries, all heads: [A, N*D] each."""
        scales, name = weights["modulation.cross_audio"][0], "audio_to_video_attn"
        rows = self._normalise(hidden_states, scales[0], scales[1])
        keys = self._rotate(weights, f"{name}.to_k", f"{name}.norm_k", rows, "cross_audio", 1)
        return self._gather_columns(keys), self._gather_columns(self._project(weights, f"{name}.to_v", rows))

    def attend_to_video(
        self, hidden_states: jax.Array, weights: Params, keys: jax.Array, values: jax.Array
    ) -> jax.Array:
        """Return the tokens after attention to the video's keys and values, [t, N*D] of this device's tokens."""
        scales, name = weights["modulation.cross_audio"][0], "video_to_audio_attn"
        rows = self._normalise(hidden_states, scales[2], scales[3])
        scale = query_scale(self._width)
        queries = self._rotate(weights, f"{name}.to_q", f"{name}.norm_q", rows, "cross_audio", scale)
        attended = self._own_columns(self._attend_to_spread(self._gather_columns(queries), keys, values))
        gate = weights["modulation.cross_audio_gate"][0, 0]
        return self._add(weights, name, self._gate_heads(weights, name, rows, attended), hidden_states, gate)

    def feed_forward(self, hidden_states: jax.Array, weights: Params) -> jax.Array:
        """Return the tokens after the feed-forward layer."""
        modulation = weights["modulation.audio"][0]
        rows = self._normalise(hidden_states, modulation[4], modulation[3])
        inner = jax.nn.gelu(self._project(weights, "audio_ff.net.0.proj", rows, jnp.float32), approximate=True)
        return self._add(
            weights, "audio_ff", inner.astype(hidden_states.dtype), hidden_states, modulation[5], output="net.2"
        )

    def _attend_to_spread(self, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Attend to keys that are spread over the devices: each attends to its own, and the results are joined."""
        axes = self.layout.token_axes
        q, k, v = (x.reshape(len(x), -1, self._width) for x in (queries, keys, values))
        scores = jnp.einsum("anh,tnh->nat", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(self.start + jnp.arange(len(keys)) < self.tokens, scores, -jnp.inf)
        largest = jax.lax.pmax(scores.max(-1, keepdims=True), axes)
        weights = jnp.exp2(scores - largest)
        total = jax.lax.psum(weights.sum(-1), axes)
        attended = jnp.einsum("nat,tnh->anh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return (jax.lax.psum(attended, axes) / total.T[:, :, None]).reshape(queries.shape).astype(queries.dtype)

    def _attend(self, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return attention(queries, keys, values, heads=queries.shape[1] // self._width, platform=self.platform)

    def _normalise(self, hidden_states: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        wide = hidden_states.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.config.norm_eps)
        return (normed * (1 + scale) + shift).astype(hidden_states.dtype)

    def _project(self, weights: Params, name: str, rows: jax.Array, dtype: Any = None) -> jax.Array:
        """Apply a linear layer whose outputs are split: [.., n]."""
        if isinstance(weights[f"{name}.weight"], StackedWeight):
            return linear(ops_for(self.platform), weights, name, rows, dtype=dtype)
        product = jnp.einsum("ai,oi->ao", rows, weights[f"{name}.weight"], preferred_element_type=jnp.float32)
        return (product + weights[f"{name}.bias"].astype(jnp.float32)).astype(dtype or rows.dtype)

    def _rotate(
        self, weights: Params, name: str, norm: str, rows: jax.Array, angles: str | None, factor: float
    ) -> jax.Array:
        """Project rows to this device's heads, normalise them over all heads, and rotate them."""
        wide = self._project(weights, name, rows, jnp.float32).astype(rows.dtype).astype(jnp.float32)
        squares = self._sum((wide * wide).sum(-1, keepdims=True)) / (wide.shape[1] * self._parts)
        weight = weights[f"{norm}.weight"].astype(jnp.float32) * factor
        normed = wide * jax.lax.rsqrt(squares + self.config.norm_eps) * weight
        if angles is None:
            return normed.astype(rows.dtype)
        assert self.rotary_emb is not None
        cos, sin = (part.reshape(len(part), -1, self._width) for part in self.rotary_emb[angles])
        heads = normed.reshape(cos.shape)
        rotated = heads * cos + jnp.roll(heads, self._width // 2, axis=-1) * sin
        return rotated.reshape(normed.shape).astype(rows.dtype)

    def _gate_heads(self, weights: Params, name: str, rows: jax.Array, attended: jax.Array) -> jax.Array:
        if not self.config.audio_gated_attn:
            return attended
        gates = 2 * jax.nn.sigmoid(self._project(weights, f"{name}.to_gate_logits", rows, jnp.float32))
        return (attended * jnp.repeat(gates, self._width, axis=1)).astype(attended.dtype)

    def _add(
        self,
        weights: Params,
        name: str,
        rows: jax.Array,
        residual: jax.Array,
        gate: jax.Array,
        output: str = "to_out.0",
    ) -> jax.Array:
        """Return the residual plus gate times the projection of this device's columns, summed over all devices."""
        name = f"{name}.{output}"
        if isinstance(weights[f"{name}.weight"], StackedWeight):
            return linear(ops_for(self.platform), weights, name, rows, residual=residual, gate=gate[None])
        product = self._sum(
            jnp.einsum("ai,oi->ao", rows, weights[f"{name}.weight"], preferred_element_type=jnp.float32)
        ) + weights[f"{name}.bias"].astype(jnp.float32)
        return (residual.astype(jnp.float32) + gate * product).astype(residual.dtype)
