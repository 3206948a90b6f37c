"""A MiniMax-H3 transformer as a program for slices: diffusers' parameters and arithmetic, split over the mesh.

There is one sequence, whose rows (positions.py) are spread over the devices: text, sound and video share all weights,
which are gathered layer by layer while earlier ones are in use. They differ in their modulations, of which a row has
one for its timestep and kind. The linear layers of the modulations, two fifths of the model, aren't gathered: each
device multiplies by its part.

Shapes: L rows, t those of one device, M modulations, E timesteps, N heads, D head width, C channels.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.families.minimax_h3.layers import GATE, select_gates, without_gates
from wan_tpu.families.minimax_h3.positions import Layout
from wan_tpu.families.minimax_h3.sharding import RULES
from wan_tpu.families.shared.layers import in_float32, linear, rounded_type, scan_gathering_layers
from wan_tpu.families.shared.tokens import pad_rows
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.collectives import SplitWeight, gather_during
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.ops.sparse_linear import QUERY_BLOCK, Density, SparseLinear
from wan_tpu.ops.tiles import Tiles
from wan_tpu.ops.video_sparse import Sparsity, VideoSparse
from wan_tpu.runtime.bridge import Params, call, collect_linear, to_jax, to_torch
from wan_tpu.runtime.mesh import AXES, TokenLayout, axis_size, run_on_devices, split_layers, token_layout

# Weights used before attention, which takes most of a layer: they are gathered during that of the layer before, and
# those in `_GATHERED` during its own. The output's aren't gathered early: they would be in the loop's state and copied.
_PREFETCHED = tuple(f"attn.{name}.weight" for name in ("to_q", "to_k", "to_v"))
_GATHERED = ("attn.to_out.0.weight", "ff.net.0.proj.weight", "ff.net.2.weight")
_MODULATION = "adaln_proj.linear"


class Rows(NamedTuple):
    """The rows of a sequence before their projections, with their positions.

    Attributes:
        text: From `context.refine_text`, [R, C]; padding is last.
        keyframes: Float32 [keyframes, channels], of keyframes or of references, or None.
        sound: Float32 [sound, channels].
        video: Float32 [video, channels], tokens of the video.
        positions: From `positions.place_rows`, float32 [L, 3].
        ends: From `positions.find_ends` or `end_references`, int32.
        words: int32 scalar, the number of real rows of `text`.
        voices: Float32 [voices, channels], the references' sounds, if there are references.
        real: int32 [2], the number of real rows of `keyframes` and of `voices`; by default, all.
    """

    text: jax.Array
    keyframes: jax.Array | None
    sound: jax.Array
    video: jax.Array
    positions: jax.Array
    ends: jax.Array
    words: jax.Array
    voices: jax.Array | None = None
    real: jax.Array | None = None


def predict(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    rows: Rows,
    layout: Layout,
    timestep: jax.Array,
    sparse: Density | Sparsity | None = None,
    grid: tuple[int, int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the velocities of the video's tokens and of the sound's latents, float32, in the shapes of `rows`.

    Args:
        module: The transformer.
        params: Its weights.
        mesh: The devices.
        rows: The sequence.
        layout: How many rows of each kind there are.
        timestep: Float32 [2 to 4]: the timestep of the video and the text, the sound's, the keyframes', the voices'.
        sparse: How sparse attention is; None for attention to all keys. With `Sparsity` the sequence is in the order of
            its tiles, and there are gates among the weights.
        grid: The video's tokens in time, height and width, for `Sparsity`.
    """
    gates = select_gates(params)
    assert bool(gates) == isinstance(sparse, Sparsity)
    real = jnp.array(layout.padded[1:], jnp.int32) if rows.real is None else rows.real
    counts = jnp.concatenate([jnp.reshape(rows.words, 1), real])
    sound_start = jnp.sum(counts)
    video_start, tiles = sound_start + layout.sound, None
    if isinstance(sparse, Sparsity):
        assert grid is not None
        tiles = cut_tiles(grid, layout)
        rows = rows._replace(video=rows.video[tiles.order])
        video_start, sound_start = jnp.int32(0), jnp.int32(layout.video + layout.keyframes)

    def method(module: Any, video: torch.Tensor) -> jax.Array:
        block = 1 if sparse is None else QUERY_BLOCK
        tokens = token_layout(mesh, 1, layout.rows, module.config.num_attention_heads, block)
        dtype = rows.text.dtype
        with in_float32():
            temb = jax.nn.silu(to_jax(module.time_embedder(module.time_proj(to_torch(timestep)))))
            keyframes = [] if rows.keyframes is None else [to_jax(module.proj_in(to_torch(rows.keyframes)))]
            voices = [] if rows.voices is None else [to_jax(module.audio_proj_in(to_torch(rows.voices)))]
            sound = to_jax(module.audio_proj_in(to_torch(rows.sound)))
        head = module.norm_out.linear(to_torch(temb.astype(dtype)))
        # Few channels are moved here, once a step.
        room = jnp.zeros((tokens.padded, video.shape[1]), jnp.float32)
        step = _Step(module, mesh, tokens, layout, sparse, tiles)
        parameters = module.transformer_blocks.template.named_parameters()
        blocks = to_jax({name: value for name, value in parameters if GATE not in name})
        return step.run(
            _Inputs(
                video=jax.lax.dynamic_update_slice(room, to_jax(video), (video_start, 0)),
                replicated=jnp.concatenate([part.astype(dtype) for part in (rows.text, *keyframes, *voices, sound)]),
                positions=pad_rows(rows.positions, tokens.padded),
                ends=rows.ends,
                counts=counts,
                temb=temb,
                head=to_jax(head).reshape(len(temb), 2, -1).astype(jnp.float32),
                blocks=blocks | gates,
                other_weights=_collect_other_weights(module),
            )
        )

    velocities: jax.Array = call(module, without_gates(params), method, rows.video)
    channels = rows.video.shape[1]
    of_video = jax.lax.dynamic_slice_in_dim(velocities, video_start, layout.video)[:, :channels]
    of_sound = jax.lax.dynamic_slice_in_dim(velocities, sound_start, layout.sound)[:, channels:]
    return of_video if tiles is None else of_video[np.argsort(tiles.order)], of_sound


def cut_tiles(grid: tuple[int, int, int], layout: Layout) -> Tiles:
    """Return the tiles of a sequence for video sparse attention."""
    return Tiles(grid, (layout.keyframes, layout.sound, layout.text))


class _Inputs(NamedTuple):
    """The inputs of one step's blocks; `_Step.run` has their shardings.

    Attributes:
        video: Float32 [L, channels], tokens of the video; other rows are zero.
        replicated: [L - video, C], all other rows, padding of the text included.
        positions: Float32 [L, 3].
        ends: int32 [M - 1], where each run of rows with one modulation ends, but for the last.
        counts: int32 [3], the number of real rows of the text, of keyframes and of voices.
        temb: Float32 [E, channels], of the timesteps, after its activation.
        head: Shift and scale of each timestep before the output, float32 [E, 2, C].
        blocks: The stacked weights of the layers.
        other_weights: The weights outside the layers.
    """

    video: jax.Array
    replicated: jax.Array
    positions: jax.Array
    ends: jax.Array
    counts: jax.Array
    temb: jax.Array
    head: jax.Array
    blocks: Params
    other_weights: Params


class _Step:
    """One step's blocks inside a `jax.shard_map`."""

    def __init__(
        self,
        module: Any,
        mesh: Mesh,
        tokens: TokenLayout,
        layout: Layout,
        sparse: Density | Sparsity | None,
        tiles: Tiles | None,
    ) -> None:
        config, self._logits, self._values = module.config, module.logits_dtype, module.values_dtype
        self._config, self._mesh, self._tokens, self._layout, self._tiles = config, mesh, tokens, layout, tiles
        self._sparse: SparseLinear | VideoSparse | None = None
        if isinstance(sparse, Density):
            self._sparse = SparseLinear(sparse.value, shortest=layout.rows - layout.text + 1)
        elif sparse is not None and tiles is not None:
            self._sparse = VideoSparse(tiles, tiles.kept(sparse.value))
        self._heads, self._width = config.num_attention_heads, config.attention_head_dim
        self._platform = mesh.devices.flat[0].platform
        self._groups = head_groups(mesh, self._heads, tokens.head_axes)
        self._key_parts = key_parts(mesh, self._heads, self._width, tokens.head_axes)
        # Where devices share heads, keys are gathered after their exchange, those of the first round before the others.
        self._gathered_parts = self._key_parts if axis_size(mesh, tokens.token_axes) > self._groups else ()
        self._ops: Ops = ops_for(self._platform)
        self._modulations = layout.modulations if tiles is None else layout.modulations_by_tiles

    def run(self, inputs: _Inputs) -> jax.Array:
        """Return the outputs of both heads side by side, float32 [L, channels of video and sound]."""
        self._split = split_layers(self._mesh, RULES, "transformer_blocks", inputs.blocks)
        rows = P(self._tokens.token_axes)
        return run_on_devices(
            self._run_on_device, self._mesh, inputs, rows, video=rows, positions=rows, blocks=self._split
        )

    def _run_on_device(self, inputs: _Inputs) -> jax.Array:
        ops, other_weights, count = self._ops, inputs.other_weights, len(inputs.video)
        start, layout = jax.lax.axis_index(self._tokens.token_axes) * count, self._layout
        dtype, ends = inputs.replicated.dtype, inputs.ends - start
        with in_float32():
            video = linear(ops, other_weights, "proj_in", inputs.video)
        row = start + jnp.arange(count)
        # Each part follows the real rows of the part before it, and in `replicated` its padding.
        part_ends = jnp.cumsum(inputs.counts)
        source, is_video = row, row >= part_ends[-1] + layout.sound
        for part, padded in enumerate(layout.padded):
            source += jnp.where(row < part_ends[part], 0, padded - inputs.counts[part])
        in_tile = None
        if self._tiles is not None:  # Keyframes and sound follow the video, and the text follows them.
            is_video, behind, others = row < layout.video, row - layout.video, layout.media - layout.video
            source = jnp.where(behind < others, behind + layout.text, behind - others)
            of_rows = jnp.pad(self._tiles.of_rows, (0, self._tokens.padded - self._tiles.rows))
            firsts, most = self._tiles.list_windows(count, self._tokens.padded // count)
            tile = jax.lax.dynamic_slice_in_dim(of_rows, start, count) - jnp.asarray(firsts)[start // count]
            in_tile = jax.nn.one_hot(tile, most, dtype=dtype)
        replicated = inputs.replicated[jnp.clip(source, 0, len(inputs.replicated) - 1)]
        hidden_states = jnp.where(is_video[:, None], video.astype(dtype), replicated)
        modulations = self._modulate(inputs)
        rotary_emb = rotary_tables(self._config, inputs.positions)

        def layer(
            hidden_states: jax.Array, weights: Params, next_weights: Mapping[str, SplitWeight], index: jax.Array
        ) -> tuple[jax.Array, Params]:
            modulation = jax.lax.dynamic_index_in_dim(modulations, index, keepdims=False)
            return self._block(
                hidden_states, weights, next_weights, modulation, rotary_emb, ends, part_ends[-1], in_tile
            )

        layers = {name: value for name, value in inputs.blocks.items() if not name.startswith(_MODULATION)}
        depth = len(modulations)
        hidden_states = scan_gathering_layers(
            layer, hidden_states, layers, self._split, depth=depth, prefetched=_PREFETCHED, platform=self._platform
        )
        times = [time for time, _ in self._modulations]
        shift, scale = (inputs.head[jnp.array(times), i] for i in range(2))
        scale = (1 + scale) * other_weights["norm_out.norm.weight"].astype(jnp.float32)
        normed = ops.layer_norm(
            hidden_states, scale, shift, eps=self._config.final_norm_eps, centred=False, first_rows=ends
        )
        with in_float32():
            return linear(ops, other_weights, "heads", normed.astype(jnp.float32))

    def _modulate(self, inputs: _Inputs) -> jax.Array:
        """Return every layer's shifts, scales and gates of attention and feed-forward, float32 [layers, M, 6, C].

        They are computed at once, before the layers, by a product with split matrices whose results are gathered, not
        the matrices.
        """
        weight, bias = inputs.blocks[f"{_MODULATION}.weight"], inputs.blocks[f"{_MODULATION}.bias"]
        product = jnp.einsum(
            "loe,te->lto", weight, inputs.temb.astype(weight.dtype), preferred_element_type=jnp.float32
        )
        if self._split[f"{_MODULATION}.weight"] == P(None, AXES, None) and self._mesh.size > 1:
            product = jax.lax.all_gather(product, AXES, axis=2, tiled=True)
        rows = (product + bias.astype(jnp.float32)[:, None]).reshape(*product.shape[:2], 3, 6, -1)
        return jnp.stack([rows[:, time, kind] for time, kind in self._modulations], axis=1)

    def _block(
        self,
        hidden_states: jax.Array,
        weights: Params,
        next_weights: Mapping[str, SplitWeight],
        modulation: jax.Array,
        rotary_emb: tuple[jax.Array, jax.Array],
        ends: jax.Array,
        count: jax.Array,
        in_tile: jax.Array | None,
    ) -> tuple[jax.Array, Params]:
        """Run one layer, as in diffusers' MiniMaxH3TransformerBlock, and gather the next one's first weights.

        Args:
            hidden_states: [t, C].
            weights: The layer's weights.
            next_weights: Weights of the next layer, `_PREFETCHED`, if they are split.
            modulation: [M, 6, C].
            rotary_emb: Cosines and sines, [t, D] each.
            ends: int32 [M - 1], where each segment but the last one ends.
            count: The number of real rows of text, keyframes and voices.
            in_tile: With video sparse attention, ones where a row is of a tile, [t, W], for the tiles of these rows.
        """
        ops, config = self._ops, self._config
        shift, scale, gate, ff_shift, ff_scale, ff_gate = (modulation[:, i] for i in range(6))

        def project(name: str, rows: Any, **options: Any) -> jax.Array:
            return linear(ops, weights, name, rows, dtype=hidden_states.dtype, **options)

        def normalise(name: str, shift: jax.Array, scale: jax.Array, target: str) -> Any:
            """Normalise the inputs of the linear layer `target`."""
            weight = weights[f"{name}.weight"].astype(jnp.float32) * (1 + scale)
            return ops.layer_norm(
                hidden_states,
                weight,
                shift,
                eps=config.norm_eps,
                centred=False,
                first_rows=ends,
                rounded=rounded_type(weights, target),
            )

        def rotate(name: str, norm: str, rows: Any, factor: float, **options: Any) -> Any:
            weight = weights[f"attn.{norm}.weight"].astype(jnp.float32) * factor
            projected = project(f"attn.{name}", rows)
            return ops.head_norm_rope(
                projected, weight, None, rotary_emb, eps=config.qk_norm_eps, groups=self._groups, **options
            )

        normed = normalise("norm1", shift, scale, "attn.to_q")
        to_gather = [{}, *({name: weights[name]} for name in _GATHERED)] if next_weights else []
        if to_gather and in_tile is not None:
            to_gather[1] |= {f"{GATE}.weight": weights[f"{GATE}.weight"]}
        output = exchanged_attention(
            normed,
            Projections(
                query=lambda rows: rotate("to_q", "norm_q", rows, query_scale(self._width), parts=self._key_parts),
                key=lambda rows: rotate("to_k", "norm_k", rows, 1, parts=self._gathered_parts),
                value=lambda rows: project("attn.to_v", rows, groups=self._groups),
                last="query",
            ),
            heads=self._heads,
            kv_len=count + self._layout.sound + self._layout.video,
            token_axes=self._tokens.token_axes,
            head_axes=self._tokens.head_axes,
            platform=self._platform,
            sparse=self._sparse,
            qk=self._logits,
            pv=self._values,
            to_gather=to_gather,
        )
        weights, attended = weights | output.gathered, output.tokens
        if in_tile is not None:
            attended = _add_tiles(attended, output.tiles, project(GATE, normed, groups=self._groups), in_tile)
        coming = [{name: next_weights[name]} if next_weights else {} for name in _PREFETCHED]
        hidden_states, query = gather_during(
            coming[0],
            attended,
            lambda attended: project("attn.to_out.0", attended, residual=hidden_states, gate=gate, first_rows=ends),
        )
        inner, key = gather_during(
            coming[1],
            normalise("norm2", ff_shift, ff_scale, "ff.net.0.proj"),
            lambda rows: project("ff.net.0.proj", rows, activation="swiglu"),
        )
        hidden_states, value = gather_during(
            coming[2],
            inner,
            lambda inner: project("ff.net.2", inner, residual=hidden_states, gate=ff_gate, first_rows=ends),
        )
        return hidden_states, query | key | value


def _add_tiles(
    attended: tuple[jax.Array, ...], tiles: tuple[jax.Array, ...], gate: jax.Array, in_tile: jax.Array
) -> tuple[jax.Array, ...]:
    """Add to each row of attention's results that of its tile, times the row's gate.

    Args:
        attended: [G, t, columns] for each round, without G if there is one group.
        tiles: [G, W, columns] for each round.
        gate: [G, t, all rounds' columns].
        in_tile: Ones where a row is of a tile, [t, W]: a product, because a TPU gathers rows one by one.
    """
    sums, start = [], 0
    precision = "highest" if in_tile.dtype == jnp.float32 else None
    for rows, coarse in zip(attended, tiles, strict=True):
        part = gate[..., start : start + rows.shape[-1]].astype(jnp.float32)
        of_rows = jnp.einsum(
            "tn,...nc->...tc", in_tile, coarse, precision=precision, preferred_element_type=jnp.float32
        )
        sums.append((rows.astype(jnp.float32) + of_rows * part).astype(rows.dtype))
        start += rows.shape[-1]
    return tuple(sums)


def rotary_tables(config: Any, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of every row's angles, [t, D] each, for pairs (i, i + D/2); the last ones stay."""
    # The host computes them: positions in the thousands enlarge the few roundings by which a TPU's powers are off.
    exponents = np.arange(0, 2 * config.rope_freq_dim, 2, dtype=np.float32) / np.float32(2 * config.rope_freq_dim)
    speeds = np.float32(1) / np.float32(config.rope_theta) ** exponents
    angles = (positions[:, :, None] * speeds).reshape(len(positions), -1)
    angles = jnp.pad(angles, ((0, 0), (0, config.attention_head_dim // 2 - angles.shape[1])))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)


def _collect_other_weights(module: Any) -> Params:
    """Return the weights outside the blocks, both heads as one matrix."""
    heads = module.proj_out, module.audio_proj_out
    return collect_linear(proj_in=module.proj_in) | {
        "norm_out.norm.weight": to_jax(module.norm_out.norm.weight),
        "heads.weight": jnp.concatenate([to_jax(head.weight) for head in heads]),
        "heads.bias": jnp.concatenate([to_jax(head.bias) for head in heads]),
    }
