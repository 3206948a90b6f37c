"""The sound's stream of an LTX-2 transformer, inside the `jax.shard_map` of `../transformer.py`.

Every device has all tokens of the sound, and its own heads and hidden units of the weights ('tp'). There are so few
tokens that plain XLA is as good as kernels. But where each device has all weights, kernels read large ones in place.

The tokens of all evaluations lie one behind the other, as the video's do (`video.py`).

Shapes: A tokens of the sound, E evaluations, S tokens of a text, t tokens of the video on one device, N heads, D head
width, C channels, M timesteps, n columns of a device's heads.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wan_tpu.families.ltx2.guidance import Evaluation
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
        evaluations: What the streams are computed for.
        segments: How many tokens have each timestep, in order.
        rotary_emb: This device's columns of cosines and sines [A, n], for attention to itself and to the video.
        start: The first of this device's tokens of the video.
    """

    config: Any
    mesh: Mesh
    layout: TokenLayout
    tokens: int
    platform: str
    evaluations: Sequence[Evaluation]
    segments: Sequence[int]
    rotary_emb: dict[str, tuple[jax.Array, jax.Array]] | None = None
    start: jax.Array | int = 0

    def on_device(self, rotary_emb: dict[str, jax.Array], start: jax.Array) -> "SoundStream":
        """Return the stream with what this device knows: its heads' angles, and where its tokens begin."""
        own = {name: tuple(self._own_columns(part) for part in rotary_emb[name]) for name in ("audio", "cross_audio")}
        return replace(self, rotary_emb=own, start=start)  # type: ignore[arg-type]

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

    def attend_to_itself(self, hidden_states: jax.Array, weights: Params, layer: jax.Array) -> jax.Array:
        """Return the tokens [E * A, C] after self-attention, or with unmixed values where it is perturbed."""
        modulation, name = weights["modulation.audio"], "audio_attn1"
        rows = self._normalise(hidden_states, modulation[:, 1], modulation[:, 0])
        values = self._project(weights, f"{name}.to_v", rows)
        queries = self._rotate(weights, f"{name}.to_q", f"{name}.norm_q", rows, "audio", query_scale(self._width))
        keys = self._rotate(weights, f"{name}.to_k", f"{name}.norm_k", rows, "audio", 1)
        results = []
        parts = (split_rows(x, len(self.evaluations)) for x in (queries, keys, values))
        for evaluation, own in zip(self.evaluations, zip(*parts, strict=True), strict=True):
            result, perturbed = self._attend(*own), evaluation.is_perturbed(layer)
            results.append(result if perturbed is None else jnp.where(perturbed, own[2], result))
        attended = join_rows(results)
        return self._add(
            weights, name, self._gate_heads(weights, name, rows, attended), hidden_states, modulation[:, 2]
        )

    def text_keys(self, weights: Params, encoder_hidden_states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values of one text, [S, n] each."""
        if "modulation.audio_text" in weights:
            shift, scale = weights["modulation.audio_text"][0]
            encoder_hidden_states = (encoder_hidden_states.astype(jnp.float32) * (1 + scale) + shift).astype(
                encoder_hidden_states.dtype
            )
        keys = self._rotate(weights, "audio_attn2.to_k", "audio_attn2.norm_k", encoder_hidden_states, None, 1)
        return keys, self._project(weights, "audio_attn2.to_v", encoder_hidden_states)

    def attend_to_text(
        self, hidden_states: jax.Array, weights: Params, keys: Sequence[tuple[jax.Array, jax.Array]]
    ) -> jax.Array:
        """Return the tokens after attention to a text, of whose keys each evaluation has its own."""
        modulation, name = weights["modulation.audio"], "audio_attn2"
        none = jnp.zeros((1, hidden_states.shape[1]), jnp.float32)
        has_own = modulation.shape[1] > 6
        shift, scale, gate = (modulation[:, i] for i in range(6, 9)) if has_own else (none, none, none + 1)
        rows = self._normalise(hidden_states, scale, shift)
        queries = self._rotate(weights, f"{name}.to_q", f"{name}.norm_q", rows, None, query_scale(self._width))
        parts = split_rows(queries, len(self.evaluations))
        pairs = zip(self.evaluations, parts, strict=True)
        attended = join_rows([self._attend(part, *keys[evaluation.text]) for evaluation, part in pairs])
        return self._add(weights, name, self._gate_heads(weights, name, rows, attended), hidden_states, gate)

    def keys_for_video(
        self, hidden_states: jax.Array, weights: Params, evaluations: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return the first evaluations' keys and values for the video's queries, all heads: [E * A, N*D] each."""
        scales, name = weights["modulation.cross_audio"], "audio_to_video_attn"
        rows = self._normalise(self._first(hidden_states, evaluations), scales[:, 0], scales[:, 1])
        keys = self._rotate(weights, f"{name}.to_k", f"{name}.norm_k", rows, "cross_audio", 1)
        return self._gather_columns(keys), self._gather_columns(self._project(weights, f"{name}.to_v", rows))

    def _first(self, x: jax.Array, evaluations: int) -> jax.Array:
        """Return the rows of the first evaluations."""
        return x[: len(x) // len(self.evaluations) * evaluations]

    def attend_to_video(
        self, hidden_states: jax.Array, weights: Params, keys: jax.Array, values: jax.Array, evaluations: int
    ) -> jax.Array:
        """Return the tokens after the first evaluations have attended to the video.

        Args:
            keys, values: Those of this device's tokens of the video, [E * t, N*D].
        """
        scales, name = weights["modulation.cross_audio"], "video_to_audio_attn"
        rows = self._normalise(self._first(hidden_states, evaluations), scales[:, 2], scales[:, 3])
        scale = query_scale(self._width)
        queries = self._rotate(weights, f"{name}.to_q", f"{name}.norm_q", rows, "cross_audio", scale)
        attended = self._attend_to_spread(self._gather_columns(queries), keys, values, evaluations)
        attended = self._own_columns(attended)
        gate = weights["modulation.cross_audio_gate"][:, 0]
        return self._add(weights, name, self._gate_heads(weights, name, rows, attended), hidden_states, gate)

    def feed_forward(self, hidden_states: jax.Array, weights: Params) -> jax.Array:
        """Return the tokens after the feed-forward layer."""
        modulation = weights["modulation.audio"]
        rows = self._normalise(hidden_states, modulation[:, 4], modulation[:, 3])
        inner = jax.nn.gelu(self._project(weights, "audio_ff.net.0.proj", rows, jnp.float32), approximate=True)
        return self._add(
            weights, "audio_ff", inner.astype(hidden_states.dtype), hidden_states, modulation[:, 5], output="net.2"
        )

    def _attend_to_spread(self, queries: jax.Array, keys: jax.Array, values: jax.Array, evaluations: int) -> jax.Array:
        """Attend to keys that are spread over the devices: each attends to its own, and the results are joined."""
        axes = self.layout.token_axes
        q, k, v = (x.reshape(evaluations, len(x) // evaluations, -1, self._width) for x in (queries, keys, values))
        scores = jnp.einsum("eanh,etnh->enat", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(self.start + jnp.arange(k.shape[1]) < self.tokens, scores, -jnp.inf)
        largest = jax.lax.pmax(scores.max(-1, keepdims=True), axes)
        weights = jnp.exp2(scores - largest)
        total = jax.lax.psum(weights.sum(-1), axes)
        attended = jnp.einsum("enat,etnh->eanh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        attended = jax.lax.psum(attended, axes) / total.swapaxes(1, 2)[..., None]
        return attended.reshape(queries.shape).astype(queries.dtype)

    def _attend(self, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return attention(queries, keys, values, heads=queries.shape[1] // self._width, platform=self.platform)

    def find_segments(self, values: jax.Array, evaluations: int | None = None) -> tuple[jax.Array, jax.Array | int]:
        """Return what each segment of the rows of all evaluations, or of the first ones, has of [M, C], and its end."""
        if len(values) == 1:
            return values, 0
        count = evaluations or len(self.evaluations)
        ends = list(itertools.accumulate([*self.segments] * count))
        return jnp.tile(values, (count, 1)), jnp.array(ends[:-1], jnp.int32)

    def _spread(self, values: jax.Array, rows: int) -> jax.Array:
        """Return what each row has of [M, C]; [1, C] where all have the same."""
        if len(values) == 1:
            return values
        tokens = sum(self.segments)
        spread = jnp.repeat(values, np.array(self.segments), axis=0, total_repeat_length=tokens)
        return jnp.tile(spread, (rows // tokens, 1))

    def _normalise(self, hidden_states: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        wide = hidden_states.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.config.norm_eps)
        scale, shift = (self._spread(values, len(wide)) for values in (scale, shift))
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
        heads = normed.reshape(-1, *cos.shape)
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
        """Return the residual plus gate [M, C] times the projection of this device's columns, summed over all devices.

        Rows of the residual that come after the projected ones stay as they are.
        """
        name = f"{name}.{output}"
        if isinstance(weights[f"{name}.weight"], StackedWeight):
            gates, first_rows = self.find_segments(gate, len(rows) // sum(self.segments))
            # A block of the kernel is all of so few rows, and may not be a part of more.
            own = {"residual": residual[: len(rows)], "gate": gates, "first_rows": first_rows}
            result = linear(ops_for(self.platform), weights, name, rows, **own)
            return result if len(rows) == len(residual) else jnp.concatenate([result, residual[len(rows) :]])
        product = self._sum(
            jnp.einsum("ai,oi->ao", rows, weights[f"{name}.weight"], preferred_element_type=jnp.float32)
        ) + weights[f"{name}.bias"].astype(jnp.float32)
        gate = self._spread(gate, len(product))
        result = (residual[: len(product)].astype(jnp.float32) + gate * product).astype(residual.dtype)
        return result if len(product) == len(residual) else jnp.concatenate([result, residual[len(product) :]])


def split_rows(x: jax.Array, count: int) -> list[jax.Array]:
    """Return x [count * rows, C] in equal parts."""
    rows = len(x) // count
    return [x] if count == 1 else [x[number * rows : (number + 1) * rows] for number in range(count)]


def join_rows(parts: Sequence[jax.Array], axis: int = 0) -> jax.Array:
    """Undo `split_rows`, along any axis."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
