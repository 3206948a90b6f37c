"""The video's stream of an LTX-2 transformer, inside the `jax.shard_map` of `../transformer.py`.

The tokens of all evaluations lie one behind the other, so that linear layers read their weights once for all of them;
each attends by itself.

Shapes: L tokens of the video, t those of one device, E evaluations, S tokens of a text, N heads, D head width, C
channels, G head groups, M timesteps.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.families.ltx2.guidance import Evaluation
from wan_tpu.families.ltx2.streams.sound import SoundStream, join_rows, split_rows
from wan_tpu.families.shared.layers import SPLIT, StackedWeight, linear
from wan_tpu.ops.attention import attention, query_scale
from wan_tpu.ops.dispatch import ops_for
from wan_tpu.ops.exchange import AttentionOutput, Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.mesh import SHARDS, TokenLayout, axis_size

# Weights used before or right after self-attention, which takes most of a layer: they are gathered during that of the
# layer before, and those in `GATHERED` during its own.
PREFETCHED = tuple(f"attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
GATHERED = ("ff.net.0.proj.weight", "ff.net.2.weight")


class VideoStream:
    """One step's layers of the video's stream, on one device's tokens."""

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        layout: TokenLayout,
        grid: tuple[int, ...],
        split: Mapping[str, P],
        *,
        rotary_emb: Mapping[str, jax.Array],
        segments: Sequence[int],
        count: int,
        evaluations: Sequence[Evaluation],
    ) -> None:
        """Prepare the angles of this device's tokens.

        Args:
            config: The transformer's configuration.
            mesh: The devices.
            layout: How the tokens are laid out on them.
            grid: Latent frames, height and width.
            split: How the weights of the layers are split, by name.
            rotary_emb: From `positions.make_tables`.
            segments: How many tokens have each timestep, in order.
            count: t.
            evaluations: What the streams are computed for; those in which the streams are isolated come last.
        """
        self._count, self._evaluations = count, evaluations
        self._mesh, self._layout, self._split = mesh, layout, split
        self._tokens, self._heads = grid[0] * grid[1] * grid[2], config.num_attention_heads
        self._width, self._cross_width = config.attention_head_dim, config.audio_attention_head_dim
        self._gated, self._modulates_text, self._eps = config.gated_attn, config.cross_attn_mod, config.norm_eps
        self._platform = mesh.devices.flat[0].platform
        self._groups = head_groups(mesh, self._heads, layout.head_axes)
        self._key_parts = key_parts(mesh, self._heads, self._width, layout.head_axes)
        self._ops = ops_for(self._platform)
        self.start = jax.lax.axis_index(layout.token_axes) * count
        # Rows of all evaluations are segments in turn, of every timestep.
        ends: list[Any] = [jnp.clip(end - self.start, 0, count) for end in itertools.accumulate(segments[:-1])]
        numbers = range(len(evaluations))
        self._ends = jnp.array([number * count + end for number in numbers for end in (*ends, count)])
        tokens = self.start + jnp.arange(count)
        self._rope = _add_axes(rotary_emb, grid, tokens)
        tables = _select_frames(rotary_emb["cross"], grid, tokens)
        self._cross_rope = tuple(jnp.tile(table, (self._mixed, 1)) for table in tables)

    @property
    def _mixed(self) -> int:
        """In how many evaluations, the first ones, video and sound attend to each other."""
        return sum(not evaluation.is_isolated for evaluation in self._evaluations)

    def _parts(self, x: jax.Array) -> list[jax.Array]:
        """Return the rows of each evaluation."""
        return split_rows(x, len(x) // self._count)

    def _project(self, weights: Params, name: str, rows: Any, **options: Any) -> jax.Array:
        return linear(self._ops, weights, name, rows, **options)

    def _add(
        self,
        weights: Params,
        name: str,
        rows: Any,
        residual: jax.Array,
        gate: jax.Array | None,
        evaluations: int | None = None,
    ) -> jax.Array:
        """Return the residual plus gate [M, C] times a linear layer's result for the rows of the first evaluations."""
        segments, first_rows = self.find_segments(gate, evaluations)
        return self._project(weights, name, rows, residual=residual, gate=segments, first_rows=first_rows)

    def find_segments(self, values: Any, evaluations: int | None = None) -> tuple[Any, jax.Array | int]:
        """Return what each segment of the rows of all evaluations, or of the first ones, has of [M, C], and its end."""
        if values is None or len(values) == 1:
            return values, 0
        count = evaluations or len(self._evaluations)
        return jnp.tile(values, (count, 1)), self._ends[: len(values) * count - 1]

    def _normalise(
        self, hidden_states: jax.Array, scale: jax.Array, shift: jax.Array, evaluations: int | None = None
    ) -> jax.Array:
        """Return the RMS-normalised rows with scale and shift, [M, C] each, perhaps of the first evaluations only."""
        (scale, first_rows), (shift, _) = (self.find_segments(values, evaluations) for values in (scale, shift))
        rows = None if evaluations is None else evaluations * self._count
        normed: jax.Array = self._ops.layer_norm(
            hidden_states, 1 + scale, shift, eps=self._eps, first_rows=first_rows, rows=rows, centred=False
        )
        return normed

    def _gates(self, weights: Params, name: str, rows: jax.Array) -> jax.Array | None:
        """Return the factors of each row's heads, float32 [E * t, N], or None in LTX-2.0."""
        if not self._gated:
            return None
        logits = jnp.einsum(
            "ti,ni->tn", rows, weights[f"{name}.to_gate_logits.weight"], preferred_element_type=jnp.float32
        )
        return 2 * jax.nn.sigmoid(logits + weights[f"{name}.to_gate_logits.bias"].astype(jnp.float32))

    def attend_to_itself(self, hidden_states: jax.Array, weights: Params, layer: jax.Array) -> tuple[jax.Array, Params]:
        """Return the tokens after self-attention, and the weights with those that were gathered meanwhile.

        Args:
            hidden_states: This device's tokens, [E * t, C].
            weights: The layer's weights and modulations.
            layer: Its index.
        """
        modulation = weights["modulation.video"]
        shift, scale, gate = (modulation[:, i] for i in range(3))
        rows = self._normalise(hidden_states, scale, shift)
        results = []
        for evaluation, part in zip(self._evaluations, self._parts(rows), strict=True):
            output = self._attend(part, weights, evaluation.is_perturbed(layer))
            weights = weights | output.gathered
            results.append(output.tokens)
        tokens = tuple(join_rows(parts, axis=-2) for parts in zip(*results, strict=True))
        attended = self._apply_gates(tokens, self._gates(weights, "attn1", rows))
        return self._add(weights, "attn1.to_out.0", attended, hidden_states, gate), weights

    def _attend(self, rows: jax.Array, weights: Params, perturbed: jax.Array | None) -> AttentionOutput:
        """Return the self-attention of one evaluation's rows [t, C].

        Args:
            perturbed: Whether values pass unmixed in this layer; None where they do in none.
        """

        def rotate(name: str, norm: str, rows: Any, factor: float, **options: Any) -> Any:
            weight = weights[f"attn1.{norm}.weight"].astype(jnp.float32) * factor
            return self._ops.rms_norm_rope(
                self._project(weights, f"attn1.{name}", rows),
                weight,
                self._rope,
                eps=self._eps,
                head=self._width,
                groups=self._groups,
                **options,
            )

        def value(rows: Any) -> jax.Array:
            return self._project(weights, "attn1.to_v", rows, groups=self._groups)

        def attend(_: None) -> AttentionOutput:
            return exchanged_attention(
                rows,
                Projections(
                    query=lambda rows: rotate("to_q", "norm_q", rows, query_scale(self._width)),
                    key=lambda rows: rotate("to_k", "norm_k", rows, 1, parts=self._key_parts),
                    value=value,
                ),
                heads=self._heads,
                kv_len=self._tokens,
                token_axes=self._layout.token_axes,
                head_axes=self._layout.head_axes,
                platform=self._platform,
                to_gather=[{name: weights[name]} for name in GATHERED],
            )

        def pass_values(_: None) -> AttentionOutput:
            """Return the values instead of attention's result, in the same layout."""
            values, widths = value(rows), _list_round_columns(self._key_parts, self._width)
            ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
            return AttentionOutput(
                tuple(jnp.split(values, ends, axis=-1)), None, {name: weights[name] for name in GATHERED}
            )

        return attend(None) if perturbed is None else jax.lax.cond(perturbed, pass_values, attend, None)

    def _apply_gates(self, parts: tuple[jax.Array, ...], gates: jax.Array | None) -> tuple[jax.Array, ...]:
        """Multiply each head of attention's result, [G, t, columns] in parts, or [t, columns], by its gate."""
        if gates is None:
            return parts
        groups, per_group = self._groups, self._heads // self._groups
        first, results = 0, []
        for part in parts:
            heads = part.shape[-1] // self._width
            indices = [group * per_group + first + head for group in range(groups) for head in range(heads)]
            factors = _spread_over_heads(gates, indices, self._width, part.dtype)
            if groups > 1:
                factors = factors.reshape(len(gates), groups, -1).transpose(1, 0, 2)
            results.append(part * factors)
            first += heads
        return tuple(results)

    def text_keys(self, weights: Params, encoder_hidden_states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of one text for the video, [S, C] each; every device computes some columns."""
        if self._modulates_text:
            shift, scale = weights["modulation.text"][0]
            encoder_hidden_states = (encoder_hidden_states.astype(jnp.float32) * (1 + scale) + shift).astype(
                encoder_hidden_states.dtype
            )

        def project(name: str) -> jax.Array:
            if isinstance(weights[f"attn2.{name}.weight"], StackedWeight):
                return self._project(weights, f"attn2.{name}", encoder_hidden_states)
            weight, bias = weights[f"attn2.{name}.weight"], weights[f"attn2.{name}.bias"].astype(jnp.float32)
            part = jnp.einsum("si,oi->so", encoder_hidden_states, weight, preferred_element_type=jnp.float32).astype(
                encoder_hidden_states.dtype
            )
            if self._split[f"attn2.{name}.weight"] == SPLIT and axis_size(self._mesh, SHARDS) > 1:
                part = jax.lax.all_gather(part, SHARDS, axis=1, tiled=True)
            return (part + bias).astype(encoder_hidden_states.dtype)

        keys = self._ops.rms_norm_rope(project("to_k"), weights["attn2.norm_k.weight"], None, eps=self._eps)
        return keys, project("to_v")

    def attend_to_text(
        self, hidden_states: jax.Array, weights: Params, keys: Sequence[tuple[jax.Array, jax.Array]]
    ) -> jax.Array:
        """Return the tokens after attention to a text, of whose keys each evaluation has its own."""
        modulation = weights["modulation.video"]
        none = jnp.zeros((1, hidden_states.shape[1]), jnp.float32)
        shift, scale, gate = (modulation[:, i] for i in range(6, 9)) if self._modulates_text else (none, none, None)
        rows = self._normalise(hidden_states, scale, shift)
        weight = weights["attn2.norm_q.weight"].astype(jnp.float32) * query_scale(self._width)
        queries = self._ops.rms_norm_rope(self._project(weights, "attn2.to_q", rows), weight, None, eps=self._eps)
        results = [
            attention(part, *keys[evaluation.text], heads=self._heads, platform=self._platform)
            for evaluation, part in zip(self._evaluations, self._parts(queries), strict=True)
        ]
        attended = self._gate_heads(join_rows(results), self._gates(weights, "attn2", rows))
        return self._add(weights, "attn2.to_out.0", attended, hidden_states, gate)

    def _gate_heads(self, attended: jax.Array, gates: jax.Array | None) -> jax.Array:
        if gates is None:
            return attended
        heads = gates.shape[1]
        return attended * _spread_over_heads(gates, range(heads), attended.shape[1] // heads, attended.dtype)

    def attend_to_sound(
        self, hidden_states: jax.Array, audio_hidden_states: jax.Array, weights: Params, sound: SoundStream
    ) -> tuple[jax.Array, jax.Array]:
        """Return both streams after the video has attended to the sound and the sound to the video."""
        scales, mixed = weights["modulation.cross_video"], self._mixed
        if not mixed:
            return hidden_states, audio_hidden_states
        query_rows = self._normalise(hidden_states, scales[:, 0], scales[:, 1], mixed)
        key_rows = self._normalise(hidden_states, scales[:, 2], scales[:, 3], mixed)
        width, name = self._cross_width, "audio_to_video_attn"

        def rotate(name: str, norm: str, rows: jax.Array, factor: float) -> jax.Array:
            weight = weights[f"{norm}.weight"].astype(jnp.float32) * factor
            rotated: jax.Array = self._ops.rms_norm_rope(
                self._project(weights, name, rows), weight, self._cross_rope, eps=self._eps, head=width
            )
            return rotated

        queries = rotate(f"{name}.to_q", f"{name}.norm_q", query_rows, query_scale(width))
        keys, values = (split_rows(x, mixed) for x in sound.keys_for_video(audio_hidden_states, weights, mixed))
        results = [
            attention(*parts, heads=queries.shape[1] // width, platform=self._platform)
            for parts in zip(self._parts(queries), keys, values, strict=True)
        ]
        attended = self._gate_heads(join_rows(results), self._gates(weights, name, query_rows))
        gate = weights["modulation.cross_video_gate"][:, 0]
        result = self._add(weights, f"{name}.to_out.0", attended, hidden_states, gate, mixed)
        name = "video_to_audio_attn"
        return result, sound.attend_to_video(
            audio_hidden_states,
            weights,
            rotate(f"{name}.to_k", f"{name}.norm_k", key_rows, 1),
            self._project(weights, f"{name}.to_v", key_rows),
            mixed,
        )

    def feed_forward(self, hidden_states: jax.Array, weights: Params) -> jax.Array:
        """Return the tokens after the feed-forward layer."""
        modulation = weights["modulation.video"]
        shift, scale, gate = (modulation[:, i] for i in range(3, 6))
        inner = self._project(
            weights, "ff.net.0.proj", self._normalise(hidden_states, scale, shift), activation="gelu_tanh"
        )
        return self._add(weights, "ff.net.2", inner, hidden_states, gate)


def _spread_over_heads(gates: jax.Array, heads: Sequence[int], width: int, dtype: Any) -> jax.Array:
    """Return the gates [t, N] of some heads over each one's columns, [t, heads * width].

    It is a product with ones, which takes no time in the matrix unit; a broadcast over lanes takes a fifth of a layer.
    """
    ones = np.repeat(np.eye(gates.shape[1], dtype=np.float32)[:, list(heads)], width, axis=1)
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.dot(gates.astype(dtype), jnp.asarray(ones, dtype), precision=exact, preferred_element_type=dtype)


def _list_round_columns(parts: tuple[int, ...], width: int) -> list[int]:
    """Return the columns of each round of `exchanged_attention`."""
    few, *rest = (part // width for part in parts)
    rounds = [few, *(n for n in (rest[0] - few, few) if n)] if rest else [few]
    return [n * width for n in rounds]


def _select_frames(table: jax.Array, grid: tuple[int, ...], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines [t, channels] of tokens, from a table of their frames [2, T, channels]."""
    frames = jnp.minimum(tokens // (grid[1] * grid[2]), grid[0] - 1)
    return table[0][frames], table[1][frames]


def _add_axes(axes: Mapping[str, jax.Array], grid: tuple[int, ...], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines [t, C] of tokens: each channel has one axis's, and zero in the other tables."""
    places = tokens // (grid[1] * grid[2]), tokens // grid[2] % grid[1], tokens % grid[2]
    frame, height, width = (jnp.minimum(n, size - 1) for n, size in zip(places, grid, strict=True))
    cos, sin = (axes["frames"][i][frame] + axes["height"][i][height] + axes["width"][i][width] for i in range(2))
    return cos, sin
