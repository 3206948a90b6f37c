"""An LTX-2 transformer as a program for slices: diffusers' parameters and arithmetic, split over the mesh.

Video and sound are two streams with separate weights. Each attends to itself, to its own embeddings of the text and to
the other stream. The video's tokens are spread over the devices, and its weights are gathered layer by layer while
earlier ones are in use. The sound has 126 tokens where the video has 32,640: every device of a branch has all of them,
but only its own heads and hidden units of their weights, whose results are summed over 'tp'.

Guidance takes up to four evaluations of the same latents (`Evaluation`). They run one after the other inside each
layer, with the same gathered weights; on no mesh are they split over devices.

Shapes: L tokens of the video, t those of one device, A tokens of the sound, S tokens of a text, X texts, E evaluations,
N heads, D head width, C channels of the video, M timesteps: 1, or 2 where the first latent frame is an image.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.families.ltx2.guidance import Evaluation
from wan_tpu.families.ltx2.sound_stream import SoundStream
from wan_tpu.families.shared.layers import SPLIT, linear, scan_layers
from wan_tpu.families.shared.tokens import pad_rows
from wan_tpu.ops.attention import attention, query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import AttentionOutput, Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, axis_size, token_layout, weight_spec

_BLOCK = r"transformer_blocks\..*\."
# Matrices of the video's stream, split by outputs, and gathered before they are used.
_VIDEO = (
    r"(attn1\.(to_q|to_k|to_v|to_out\.0)|attn2\.(to_q|to_out\.0)|audio_to_video_attn\.(to_q|to_out\.0)"
    r"|video_to_audio_attn\.(to_k|to_v)|ff\.net\.(0\.proj|2))"
)
# Of the video's text: split by outputs, which are gathered in place of the matrices, since a text has few tokens.
_TEXT = r"attn2\.(to_k|to_v)"
# Of the sound's stream: split by heads or hidden units (outputs), and back from them (inputs).
_HEADS = (
    r"(audio_attn1\.(to_q|to_k|to_v|to_gate_logits)|audio_attn2\.(to_q|to_k|to_v|to_gate_logits)"
    r"|audio_to_video_attn\.(to_k|to_v)|video_to_audio_attn\.(to_q|to_gate_logits)|audio_ff\.net\.0\.proj)"
)
_NORMS = r"(audio_attn[12]\.norm_[qk]|audio_to_video_attn\.norm_k|video_to_audio_attn\.norm_q)\.weight"
_SUMS = r"(audio_attn[12]\.to_out\.0|video_to_audio_attn\.to_out\.0|audio_ff\.net\.2)"
# The embeddings of timesteps, one for each use, and of LTX-2.0's text.
_EMBEDDINGS = r"(.*_embed|.*adaln|av_cross_attn_.*)\.linear\.weight"
MATRICES = rf"{_BLOCK}{_VIDEO}\.weight"
_SPLIT_ROWS = rf"({_BLOCK}({_VIDEO}|{_TEXT})\.weight|{_EMBEDDINGS})"
RULES = (
    Rule(_SPLIT_ROWS, (SHARDS, None)),
    Rule(rf"{_BLOCK}{_HEADS}\.weight", ("tp", None)),
    Rule(rf"{_BLOCK}({_HEADS}\.bias|{_NORMS})", ("tp",)),
    Rule(rf"{_BLOCK}{_SUMS}\.weight", (None, "tp")),
    Rule(rf"(?!({_SPLIT_ROWS}|{_BLOCK}({_HEADS}\.(weight|bias)|{_NORMS}|{_SUMS}\.weight))$).*", ()),
)
# Weights used before or right after self-attention, which takes most of a layer: they are gathered during that of the
# layer before, and those in `_BESIDE` during its own.
_AHEAD = tuple(f"attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_BESIDE = ("ff.net.0.proj.weight", "ff.net.2.weight")
_EPS = 1e-6  # Of the norms without weights: a constant of diffusers' pipelines' configurations.


class Conditions(NamedTuple):
    """What a step's evaluations share beside the latents.

    Attributes:
        times: float32 [M], timesteps of the video's tokens; of two, the first is for the first latent frame.
        time: float32 [1], the step's timestep, which the sound and the text have.
        text: [X, S, channels] of the video's embeddings of the texts.
        audio_text: The sound's.
        rope: From `positions.make_tables`.
    """

    times: jax.Array
    time: jax.Array
    text: jax.Array
    audio_text: jax.Array
    rope: dict[str, jax.Array]


def predict(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    video: jax.Array,
    audio: jax.Array,
    conditions: Conditions,
    evaluations: Sequence[Evaluation],
    *,
    cross_timestep: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return each evaluation's velocity of video and sound as tokens, float32 [E, L, channels] and [E, A, channels].

    Args:
        module: The transformer.
        params: Its weights.
        mesh: The devices.
        video: Latents [1, channels, T, H, W], in the dtype to compute in.
        audio: Latents as tokens [A, channels].
        conditions: What all evaluations share.
        evaluations: The evaluations.
        cross_timestep: Whether the attention between the streams is modulated by the other's timestep (LTX-2.3).
    """
    grid = video.shape[2:]

    def method(module: Any, tokens: torch.Tensor, sound: torch.Tensor, texts: Any) -> tuple[jax.Array, jax.Array]:
        embedded = _embed_times(module, conditions, cross_timestep, tokens.dtype)
        text, audio_text = (to_jax(value) for value in _project_texts(module, texts))
        count = math.prod(grid)
        layout = token_layout(mesh, 1, count, module.config.num_attention_heads)
        step = _Step(module, mesh, layout, grid, evaluations)
        first = count // grid[0] if len(conditions.times) > 1 else 0
        return step.run(
            Inputs(
                video=pad_rows(to_jax(module.proj_in(tokens)), layout.padded),
                audio=to_jax(module.audio_proj_in(sound)),
                text=text,
                audio_text=audio_text,
                rope=conditions.rope,
                modulation=embedded,
                first_tokens=jnp.int32(first),
                blocks=to_jax(dict(module.transformer_blocks.template.named_parameters())),
                outer=_outer(module),
            )
        )

    tokens = video[0].reshape(video.shape[1], -1).T
    return call(module, params, method, tokens, audio, (conditions.text, conditions.audio_text))


class Inputs(NamedTuple):
    """The inputs of one step's blocks; `_Step.run` has their shardings.

    Attributes:
        video: [L, C].
        audio: [A, channels].
        text, audio_text, rope: As in `Conditions`, projected to the streams' channels.
        modulation: From `_embed_times`, float32.
        first_tokens: How many tokens have the first of two timesteps.
        blocks: The stacked weights of the layers.
        outer: The weights behind the layers.
    """

    video: jax.Array
    audio: jax.Array
    text: jax.Array
    audio_text: jax.Array
    rope: dict[str, jax.Array]
    modulation: dict[str, jax.Array]
    first_tokens: jax.Array
    blocks: Params
    outer: Params


class _Step:
    """One step's blocks inside a `jax.shard_map`."""

    def __init__(
        self,
        module: Any,
        mesh: Mesh,
        layout: TokenLayout,
        grid: tuple[int, ...],
        evaluations: Sequence[Evaluation],
    ) -> None:
        config = module.config
        self._mesh, self._layout, self._grid, self._evaluations = mesh, layout, grid, evaluations
        self._tokens, self._heads, self._width = math.prod(grid), config.num_attention_heads, config.attention_head_dim
        self._cross_width = config.audio_attention_head_dim  # Of attention between the streams.
        self._gated, self._modulates_text, self._eps = config.gated_attn, config.cross_attn_mod, config.norm_eps
        self._platform = mesh.devices.flat[0].platform
        self._groups = head_groups(mesh, self._heads, layout.head_axes)
        self._key_parts = key_parts(mesh, self._heads, self._width, layout.head_axes)
        self._ops: Ops = ops_for(self._platform)
        self._sound = SoundStream(config, mesh, layout, self._tokens, self._platform)

    def run(self, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        """Return [E, L, channels] and [E, A, channels], float32, without padding."""
        self._specs = {
            name: weight_spec(self._mesh, RULES, f"transformer_blocks.*.{name}", value.shape[1:], stacked=True)
            for name, value in inputs.blocks.items()
        }
        whole = P()
        specs = jax.tree.map(lambda _: whole, inputs)
        specs = specs._replace(video=P(self._layout.token_axes), blocks=self._specs)
        out = (P(None, self._layout.token_axes), whole)
        local = jax.shard_map(self._local, mesh=self._mesh, in_specs=(specs,), out_specs=out, check_vma=False)
        video, audio = local(inputs)
        return video[:, : self._tokens], audio

    def _local(self, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        ops, outer, modulation = self._ops, inputs.outer, inputs.modulation
        start = jax.lax.axis_index(self._layout.token_axes) * len(inputs.video)
        self._first_rows = inputs.first_tokens - start
        self._rope = _token_tables(inputs.rope, self._grid, start + jnp.arange(len(inputs.video)))
        self._cross_rope = _rows_of(inputs.rope["cross"], self._grid, start + jnp.arange(len(inputs.video)))
        sound = self._sound.on_device(inputs.rope, start)

        def layer(hidden: Any, weights: Params, index: jax.Array) -> Any:
            weights = self._add_modulations(weights, modulation)
            keys = [self._text_keys(weights, text) for text in inputs.text]
            audio_keys = [sound.text_keys(weights, text) for text in inputs.audio_text]
            results = []
            for evaluation, (x, a) in zip(self._evaluations, hidden, strict=True):
                perturbed = _is_any(index, evaluation.perturbed_blocks)
                x, weights = self._attend_to_itself(x, weights, perturbed)
                a = sound.attend_to_itself(a, weights, perturbed)
                x = self._attend_to_text(x, weights, keys[evaluation.text])
                a = sound.attend_to_text(a, weights, audio_keys[evaluation.text])
                if not evaluation.is_isolated:
                    x, a = self._attend_to_each_other(x, a, weights, sound)
                results.append((self._feed_forward(x, weights), sound.feed_forward(a, weights)))
            return tuple(results)

        hidden = scan_layers(
            layer,
            tuple((inputs.video, inputs.audio) for _ in self._evaluations),
            inputs.blocks,
            {name: P() if _is_of_text(name) else spec for name, spec in self._specs.items()},
            depth=len(inputs.blocks["scale_shift_table"]),
            ahead=_AHEAD,
            platform=self._platform,
        )

        def head(x: jax.Array, name: str, first_rows: Any) -> jax.Array:
            shift, scale = (modulation[f"{name}head"][:, i] for i in range(2))
            normed = ops.layer_norm(x, 1 + scale, shift, eps=1e-6, first_rows=first_rows)
            weight, bias = outer[f"{name}proj_out.weight"], outer[f"{name}proj_out.bias"]
            return ops.linear(normed, weight, bias).astype(jnp.float32)

        videos = [head(x, "", self._first_rows) for x, _ in hidden]
        audios = [head(a, "audio_", 0) for _, a in hidden]
        return jnp.stack(videos), jnp.stack(audios)

    def _add_modulations(self, weights: Params, modulation: dict[str, jax.Array]) -> Params:
        """Return the layer's weights with the sums of its tables and the step's embeddings, float32 [M, rows, C]."""
        tables = {
            "video": ("scale_shift_table", slice(None)),
            "audio": ("audio_scale_shift_table", slice(None)),
            "cross_video": ("video_a2v_cross_attn_scale_shift_table", slice(4)),
            "cross_audio": ("audio_a2v_cross_attn_scale_shift_table", slice(4)),
            "cross_video_gate": ("video_a2v_cross_attn_scale_shift_table", slice(4, None)),
            "cross_audio_gate": ("audio_a2v_cross_attn_scale_shift_table", slice(4, None)),
            "text": ("prompt_scale_shift_table", slice(None)),
            "audio_text": ("audio_prompt_scale_shift_table", slice(None)),
        }
        sums = {
            name: weights[table][rows].astype(jnp.float32) + modulation[name]
            for name, (table, rows) in tables.items()
            if name in modulation
        }
        return weights | {f"modulation.{name}": value for name, value in sums.items()}

    def _project(self, weights: Params, name: str, rows: Any, **options: Any) -> jax.Array:
        return linear(self._ops, weights, name, rows, **options)

    def _normalise(self, x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        """Return the RMS-normalised rows with scale and shift, [M, C] each."""
        normed: jax.Array = self._ops.layer_norm(
            x, 1 + scale, shift, eps=self._eps, first_rows=self._first_rows, centred=False
        )
        return normed

    def _gates(self, weights: Params, name: str, rows: jax.Array) -> jax.Array | None:
        """Return the factors of each row's heads, float32 [t, N], or None in LTX-2.0."""
        if not self._gated:
            return None
        logits = jnp.einsum(
            "ti,ni->tn", rows, weights[f"{name}.to_gate_logits.weight"], preferred_element_type=jnp.float32
        )
        return 2 * jax.nn.sigmoid(logits + weights[f"{name}.to_gate_logits.bias"].astype(jnp.float32))

    def _attend_to_itself(self, x: jax.Array, w: Params, perturbed: jax.Array | None) -> tuple[jax.Array, Params]:
        """Return x after self-attention, and the weights with those that were gathered meanwhile."""
        table = w["modulation.video"]
        shift, scale, gate = (table[:, i] for i in range(3))
        rows = self._normalise(x, scale, shift)

        def rotate(name: str, norm: str, rows: Any, factor: float, **options: Any) -> Any:
            weight = w[f"attn1.{norm}.weight"].astype(jnp.float32) * factor
            return self._ops.rms_norm_rope(
                self._project(w, f"attn1.{name}", rows),
                weight,
                self._rope,
                eps=self._eps,
                head=self._width,
                groups=self._groups,
                **options,
            )

        def value(rows: Any) -> jax.Array:
            return self._project(w, "attn1.to_v", rows, groups=self._groups)

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
                beside=[{name: w[name]} for name in _BESIDE],
            )

        def pass_values(_: None) -> AttentionOutput:
            """Return the values in place of attention's result, in the same layout."""
            values, widths = value(rows), _round_columns(self._key_parts, self._width)
            ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
            return AttentionOutput(tuple(jnp.split(values, ends, axis=-1)), None, {name: w[name] for name in _BESIDE})

        output = attend(None) if perturbed is None else jax.lax.cond(perturbed, pass_values, attend, None)
        mixed = self._apply_gates(output.tokens, self._gates(w, "attn1", rows))
        x = self._project(w, "attn1.to_out.0", mixed, residual=x, gate=gate, first_rows=self._first_rows)
        return x, w | output.beside

    def _apply_gates(self, parts: tuple[jax.Array, ...], gates: jax.Array | None) -> tuple[jax.Array, ...]:
        """Multiply each head of attention's result, [G, t, columns] in parts, or [t, columns], by its gate."""
        if gates is None:
            return parts
        groups, per_group = self._groups, self._heads // self._groups
        first, results = 0, []
        for part in parts:
            heads = part.shape[-1] // self._width
            chosen = [group * per_group + first + head for group in range(groups) for head in range(heads)]
            factors = _spread_over_heads(gates, chosen, self._width, part.dtype)
            if groups > 1:
                factors = factors.reshape(len(gates), groups, -1).transpose(1, 0, 2)
            results.append(part * factors)
            first += heads
        return tuple(results)

    def _text_keys(self, w: Params, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of one text for the video, [S, C] each; every device computes some columns."""
        if self._modulates_text:
            shift, scale = w["modulation.text"][0]
            text = (text.astype(jnp.float32) * (1 + scale) + shift).astype(text.dtype)

        def project(name: str) -> jax.Array:
            weight, bias = w[f"attn2.{name}.weight"], w[f"attn2.{name}.bias"].astype(jnp.float32)
            part = jnp.einsum("si,oi->so", text, weight, preferred_element_type=jnp.float32).astype(text.dtype)
            if self._specs[f"attn2.{name}.weight"] == SPLIT and axis_size(self._mesh, SHARDS) > 1:
                part = jax.lax.all_gather(part, SHARDS, axis=1, tiled=True)
            return (part + bias).astype(text.dtype)

        keys = self._ops.rms_norm_rope(project("to_k"), w["attn2.norm_k.weight"], None, eps=self._eps)
        return keys, project("to_v")

    def _attend_to_text(self, x: jax.Array, w: Params, keys: tuple[jax.Array, jax.Array]) -> jax.Array:
        table = w["modulation.video"]
        none = jnp.zeros((1, x.shape[1]), jnp.float32)
        shift, scale, gate = (table[:, i] for i in range(6, 9)) if self._modulates_text else (none, none, None)
        rows = self._normalise(x, scale, shift)
        weight = w["attn2.norm_q.weight"].astype(jnp.float32) * query_scale(self._width)
        queries = self._ops.rms_norm_rope(self._project(w, "attn2.to_q", rows), weight, None, eps=self._eps)
        mixed = attention(queries, *keys, heads=self._heads, platform=self._platform)
        mixed = self._gate_heads(mixed, self._gates(w, "attn2", rows))
        return self._project(w, "attn2.to_out.0", mixed, residual=x, gate=gate, first_rows=self._first_rows)

    def _gate_heads(self, mixed: jax.Array, gates: jax.Array | None) -> jax.Array:
        if gates is None:
            return mixed
        heads = gates.shape[1]
        return mixed * _spread_over_heads(gates, range(heads), mixed.shape[1] // heads, mixed.dtype)

    def _attend_to_each_other(
        self, x: jax.Array, a: jax.Array, w: Params, sound: SoundStream
    ) -> tuple[jax.Array, jax.Array]:
        """Return both streams after the video has attended to the sound and the sound to the video."""
        scales = w["modulation.cross_video"]
        query_rows = self._normalise(x, scales[:, 0], scales[:, 1])
        key_rows = self._normalise(x, scales[:, 2], scales[:, 3])
        width, name = self._cross_width, "audio_to_video_attn"

        def rotate(name: str, norm: str, rows: jax.Array, factor: float) -> jax.Array:
            weight = w[f"{norm}.weight"].astype(jnp.float32) * factor
            rotated: jax.Array = self._ops.rms_norm_rope(
                self._project(w, name, rows), weight, self._cross_rope, eps=self._eps, head=width
            )
            return rotated

        queries = rotate(f"{name}.to_q", f"{name}.norm_q", query_rows, query_scale(width))
        keys, values = sound.keys_for_video(a, w)
        mixed = attention(queries, keys, values, heads=keys.shape[1] // width, platform=self._platform)
        mixed = self._gate_heads(mixed, self._gates(w, name, query_rows))
        gate = w["modulation.cross_video_gate"][:, 0]
        result = self._project(w, f"{name}.to_out.0", mixed, residual=x, gate=gate, first_rows=self._first_rows)
        name = "video_to_audio_attn"
        keys = rotate(f"{name}.to_k", f"{name}.norm_k", key_rows, 1)
        return result, sound.attend_to_video(a, w, keys, self._project(w, f"{name}.to_v", key_rows))

    def _feed_forward(self, x: jax.Array, w: Params) -> jax.Array:
        table = w["modulation.video"]
        shift, scale, gate = (table[:, i] for i in range(3, 6))
        inner = self._project(w, "ff.net.0.proj", self._normalise(x, scale, shift), activation="gelu_tanh")
        return self._project(w, "ff.net.2", inner, residual=x, gate=gate, first_rows=self._first_rows)


def _embed_times(module: Any, conditions: Conditions, cross_timestep: bool, dtype: torch.dtype) -> dict[str, jax.Array]:
    """Return the timesteps' embeddings for every use, float32 [M, rows, channels], by the names of modulations."""
    times, time = to_torch(conditions.times), to_torch(conditions.time)

    def embed(layer: Any, times: torch.Tensor) -> tuple[jax.Array, jax.Array]:
        modulation, embedding = layer(times, batch_size=len(times), hidden_dtype=dtype)
        rows = to_jax(modulation).astype(jnp.float32)
        return rows.reshape(len(rows), layer.num_mod_params, -1), to_jax(embedding).astype(jnp.float32)

    scale = module.config.cross_attn_timestep_scale_multiplier / module.config.timestep_scale_multiplier
    cross = time if cross_timestep else times  # Of the video's tokens: the sound's timestep in LTX-2.3.
    video, embedding = embed(module.time_embed, times)
    audio, audio_embedding = embed(module.audio_time_embed, time)
    results = {
        "video": video,
        "audio": audio,
        "cross_video": embed(module.av_cross_attn_video_scale_shift, cross)[0],
        "cross_audio": embed(module.av_cross_attn_audio_scale_shift, time)[0],
        "cross_video_gate": embed(module.av_cross_attn_video_a2v_gate, cross * scale)[0],
        "cross_audio_gate": embed(module.av_cross_attn_audio_v2a_gate, time * scale)[0],
        "head": to_jax(module.scale_shift_table).astype(jnp.float32) + embedding[:, None],
        "audio_head": to_jax(module.audio_scale_shift_table).astype(jnp.float32) + audio_embedding[:, None],
    }
    if module.prompt_modulation:
        results["text"] = embed(module.prompt_adaln, time)[0]
        results["audio_text"] = embed(module.audio_prompt_adaln, time)[0]
    return results


def _project_texts(module: Any, texts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the texts with the streams' channels: LTX-2.0 projects them here, LTX-2.3 did so in the connectors."""
    if not module.config.use_prompt_embeddings:
        return texts
    return module.caption_projection(texts[0]), module.audio_caption_projection(texts[1])


def _outer(module: Any) -> Params:
    heads = {"proj_out": module.proj_out, "audio_proj_out": module.audio_proj_out}
    return {
        f"{name}.{part}": to_jax(getattr(layer, part)) for name, layer in heads.items() for part in ("weight", "bias")
    }


def _spread_over_heads(gates: jax.Array, heads: Sequence[int], width: int, dtype: Any) -> jax.Array:
    """Return the gates [t, N] of some heads over each one's columns, [t, heads * width].

    It is a product with ones, which takes no time in the matrix unit; a broadcast over lanes takes a fifth of a layer.
    """
    ones = np.repeat(np.eye(gates.shape[1], dtype=np.float32)[:, list(heads)], width, axis=1)
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.dot(gates.astype(dtype), jnp.asarray(ones, dtype), precision=exact, preferred_element_type=dtype)


def _is_of_text(name: str) -> bool:
    return name in ("attn2.to_k.weight", "attn2.to_v.weight")


def _is_any(index: jax.Array, blocks: tuple[int, ...]) -> jax.Array | None:
    """Return whether a layer is one of some, or None if there are none."""
    return jnp.any(index == jnp.array(blocks)) if blocks else None


def _round_columns(parts: tuple[int, ...], width: int) -> list[int]:
    """Return the columns of each round of `exchanged_attention`."""
    few, *rest = (part // width for part in parts)
    rounds = [few, *(n for n in (rest[0] - few, few) if n)] if rest else [few]
    return [n * width for n in rounds]


def _rows_of(table: jax.Array, grid: tuple[int, ...], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines [t, channels] of tokens, from a table of their frames [2, T, channels]."""
    frames = jnp.minimum(tokens // (grid[1] * grid[2]), grid[0] - 1)
    return table[0][frames], table[1][frames]


def _token_tables(rope: dict[str, jax.Array], grid: tuple[int, ...], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines [t, C] of tokens: each channel has one axis's, and zero in the other tables."""
    frame, height, width = (jnp.minimum(n, size - 1) for n, size in zip(_places(grid, tokens), grid, strict=True))
    cos, sin = (rope["frames"][i][frame] + rope["height"][i][height] + rope["width"][i][width] for i in range(2))
    return cos, sin


def _places(grid: tuple[int, ...], tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return tokens // (grid[1] * grid[2]), tokens // grid[2] % grid[1], tokens % grid[2]
