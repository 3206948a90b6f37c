"""A CogVideoX transformer as a program for slices: diffusers' parameters and arithmetic, with tokens and weights split.

Text and video are one sequence, the text's 226 tokens first, with shared weights but separate modulations. As in the
other families, norms, gates, activations and residuals are fused into the operations that read or write them, queries
and keys pair channels (i, i + D/2) for RoPE, and each layer's weights are gathered while earlier ones are in use. The
linear layers of the modulations, a seventh of the model, aren't gathered: each device multiplies by its part, and the
results are gathered.

Shapes: B branches of guidance, T H W latent frames, height, width, L tokens of text and video, t tokens of one device,
N heads, D head width, C = N*D channels, E the width of the time embedding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.families.cogvideox.positions import rope_angles, sine_embeddings
from wan_tpu.families.cogvideox.published import TEXT_TOKENS
from wan_tpu.families.shared.layers import linear, map_branches, project_in_all_layers, rounded_type, scan_layers
from wan_tpu.families.shared.tokens import combine_axes, pad_rows, patchify
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.runtime.bridge import Params, call, collect_linear, to_jax
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, run_on_devices, split_layers, token_layout

MATRICES = r"transformer_blocks\..*\.(attn1\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))\.weight"
_SPLIT = rf"({MATRICES}|transformer_blocks\..*\.norm[12]\.linear\.weight)"
RULES = (
    Rule(_SPLIT, (SHARDS, None)),
    Rule(rf"(?!{_SPLIT}$).*", ()),
)
# Weights used before or right after attention, which takes most of a layer's time: they are gathered during the
# previous layer's attention.
_PREFETCHED = tuple(f"attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_GATHERED = ("ff.net.0.proj.weight", "ff.net.2.weight")  # Weights gathered while attention is computed.
_HEAD_EPS = 1e-6  # Epsilon of the norms of queries and keys: a constant of diffusers' block.
_OFFSET = 2.0  # The "ofs" input of 1.5's image-to-video model: a constant of the pipeline.


def embed_text(
    module: torch.nn.Module, params: Params, mesh: Mesh, encoder_hidden_states: jax.Array
) -> dict[str, jax.Array]:
    """Turn the text's embeddings [B, 226, I] into tokens, "text" [B, 226, C]."""

    def method(module: Any, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        return module.patch_embed.text_proj(encoder_hidden_states)

    tokens = call(module, params, method, encoder_hidden_states)
    return {"text": jax.lax.with_sharding_constraint(tokens, text_sharding(mesh, encoder_hidden_states.shape[0]))}


def text_sharding(mesh: Mesh, branches: int) -> NamedSharding:
    """Return the sharding of the text's tokens: every device of a branch has all of them."""
    return NamedSharding(mesh, P(token_layout(mesh, branches, 1).branch_axis))


def predict(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    latents: jax.Array,
    timestep: jax.Array,
    encoder_hidden_states: jax.Array,
) -> jax.Array:
    """Return the transformer's prediction for each branch, as the video's tokens, float32 [B, L - 226, patch values].

    Args:
        latents: [1, C, T, H, W], in the dtype to compute in, the same for every branch; an image's latents follow on C.
        timestep: [1].
        encoder_hidden_states: [B, 226, C], from `embed_text`.
    """

    def method(
        module: Any, latents: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> jax.Array:
        config = module.config
        temb = _embed_time(module, timestep, latents.dtype)
        patch = (config.patch_size_t or 1, config.patch_size, config.patch_size)
        grid = [n // p for n, p in zip(latents.shape[2:], patch, strict=True)]
        values = jnp.pad(patchify(to_jax(latents), patch), ((TEXT_TOKENS, 0), (0, 0)))
        layout = token_layout(mesh, encoder_hidden_states.shape[0], len(values))
        step = _Step(module, mesh, layout, len(values))
        tokens = step.run(
            _Inputs(
                values=pad_rows(values, layout.padded),
                positions=_positions(module, grid, layout.padded),
                rotary_emb=_rope_tables(config, grid, layout.padded),
                encoder_hidden_states=to_jax(encoder_hidden_states),
                temb=jax.nn.silu(to_jax(temb))[0],
                head=_head_modulation(module, temb).astype(jnp.float32),
                blocks=to_jax(dict(module.transformer_blocks.template.named_parameters())),
                other_weights=_other_weights(module),
            )
        )
        return tokens[:, TEXT_TOKENS : len(values)]

    return call(module, params, method, latents, timestep, encoder_hidden_states)


class _Inputs(NamedTuple):
    """The inputs of one step's blocks; `_Step.run` has their shardings."""

    values: jax.Array  # [L, patch values], zero for the text.
    positions: jax.Array | None  # [L, C], added to the tokens, or None.
    rotary_emb: tuple[jax.Array, jax.Array] | None  # Cosines and sines, two arrays [L, D], or None without RoPE.
    encoder_hidden_states: jax.Array  # [B, 226, C].
    temb: jax.Array  # [E], of the time, after its activation.
    head: jax.Array  # Shift and scale before the output, [2, C].
    blocks: Params
    other_weights: Params


class _Step:
    """One step's blocks inside a `jax.shard_map`."""

    def __init__(self, module: Any, mesh: Mesh, layout: TokenLayout, tokens: int) -> None:
        config, self._logits, self._values = module.config, module.logits_dtype, module.values_dtype
        self._mesh, self._layout, self._tokens = mesh, layout, tokens
        self._heads, self._eps = config.num_attention_heads, config.norm_eps
        self._platform = mesh.devices.flat[0].platform
        self._groups = head_groups(mesh, self._heads)
        self._key_parts = key_parts(mesh, self._heads, config.attention_head_dim)
        self._query_scale = query_scale(config.attention_head_dim)
        self._ops: Ops = ops_for(self._platform)

    def run(self, inputs: _Inputs) -> jax.Array:
        """Return [B, L, patch values], float32, padding included."""
        self._blocks = split_layers(self._mesh, RULES, "transformer_blocks", inputs.blocks)
        branches, axis = inputs.encoder_hidden_states.shape[0], self._layout.branch_axis
        self._local_branches = branches // (self._mesh.shape["dp"] if axis else 1)
        tokens = P(self._layout.token_axes)
        return run_on_devices(
            self._local,
            self._mesh,
            inputs,
            self._layout.spec,
            values=tokens,
            positions=tokens,
            rotary_emb=tokens,
            encoder_hidden_states=text_sharding(self._mesh, branches).spec,
            blocks=self._blocks,
        )

    def _local(self, inputs: _Inputs) -> jax.Array:
        ops, other_weights = self._ops, inputs.other_weights
        start = jax.lax.axis_index(self._layout.token_axes) * len(inputs.values)
        text_rows = TEXT_TOKENS - start  # How many of this device's first rows belong to the text.

        def embed(encoder_hidden_states: jax.Array) -> jax.Array:
            """Return this device's tokens [t, C], with the text's [226, C]."""
            rows = jnp.pad(encoder_hidden_states, ((0, len(inputs.values)), (0, 0)))
            rows = jax.lax.dynamic_slice_in_dim(rows, jnp.minimum(start, TEXT_TOKENS), len(inputs.values))
            video = linear(ops, other_weights, "proj", inputs.values)
            tokens = jnp.where(jnp.arange(len(rows))[:, None] < text_rows, rows, video)
            return tokens if inputs.positions is None else tokens + inputs.positions.astype(tokens.dtype)

        modulations = [self._modulations(f"{name}.linear", inputs) for name in ("norm1", "norm2")]

        def layer(hidden_states: jax.Array, weights: Params, index: jax.Array) -> jax.Array:
            first, second = (jax.lax.dynamic_index_in_dim(table, index, keepdims=False) for table in modulations)
            return map_branches(
                lambda x: self._block(x, weights, first, second, inputs.rotary_emb, text_rows), hidden_states
            )

        hidden_states = scan_layers(
            layer,
            map_branches(
                embed,
                jnp.broadcast_to(
                    inputs.encoder_hidden_states, (self._local_branches, *inputs.encoder_hidden_states.shape[1:])
                ),
            ),
            {name: value for name, value in inputs.blocks.items() if ".linear." not in name},
            self._blocks,
            depth=len(inputs.blocks["norm1.norm.weight"]),
            prefetched=_PREFETCHED,
            platform=self._platform,
        )
        shift, scale = inputs.head
        scale, shift = _fold_norm(
            other_weights["norm_out.weight"], other_weights["norm_out.bias"], scale[None], shift[None]
        )

        def head(hidden_states: jax.Array) -> jax.Array:
            final = other_weights["norm_final.weight"][None], other_weights["norm_final.bias"][None]
            normed = ops.layer_norm(ops.layer_norm(hidden_states, *final, eps=self._eps), scale, shift, eps=self._eps)
            return linear(ops, other_weights, "proj_out", normed).astype(jnp.float32)

        return map_branches(head, hidden_states)

    def _modulations(self, name: str, inputs: _Inputs) -> jax.Array:
        """Return every layer's shift, scale and gate of the tokens of text and video, float32 [layers, 2, 3, C]."""
        modulations = project_in_all_layers(inputs.blocks, self._blocks, name, inputs.temb)
        return modulations.reshape(len(modulations), 2, 3, -1)[:, ::-1]

    def _block(
        self,
        hidden_states: jax.Array,
        weights: Params,
        attention_modulation: jax.Array,
        feed_forward_modulation: jax.Array,
        rotary_emb: tuple[jax.Array, jax.Array] | None,
        text_rows: jax.Array,
    ) -> jax.Array:
        """Run one layer on this device's tokens of one branch, as in diffusers' CogVideoXBlock.

        Args:
            hidden_states: [t, C].
            attention_modulation, feed_forward_modulation: [2, 3, C], from `_modulations`.
            rotary_emb: As in `_Inputs`.
            text_rows: How many of the first rows belong to the text.
        """
        ops = self._ops

        def project(name: str, rows: Any, **options: Any) -> jax.Array:
            return linear(ops, weights, name, rows, **options)

        def normalise(name: str, modulation: jax.Array, target: str) -> Any:
            """Apply the norm `name` to the inputs of the linear layer `target`."""
            folded = _fold_norm(
                weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], modulation[:, 1], modulation[:, 0]
            )
            return ops.layer_norm(
                hidden_states, *folded, eps=self._eps, first_rows=text_rows, rounded=rounded_type(weights, target)
            )

        def rotate(name: str, rows: Any, scale: float, **options: Any) -> Any:
            vectors = (weights[f"attn1.norm_{name}.{part}"].astype(jnp.float32) * scale for part in ("weight", "bias"))
            options = {"eps": _HEAD_EPS, "groups": self._groups} | options
            return ops.head_norm_rope(project(f"attn1.to_{name}", rows), *vectors, rotary_emb, **options)

        attended, _, gathered, _ = exchanged_attention(
            normalise("norm1", attention_modulation, "attn1.to_q"),
            Projections(
                query=lambda rows: rotate("q", rows, self._query_scale),
                key=lambda rows: rotate("k", rows, 1, parts=self._key_parts),
                value=lambda rows: project("attn1.to_v", rows, groups=self._groups),
            ),
            heads=self._heads,
            kv_len=self._tokens,
            token_axes=self._layout.token_axes,
            platform=self._platform,
            to_gather=[{name: weights[name]} for name in _GATHERED],
            qk=self._logits,
            pv=self._values,
        )
        weights = weights | gathered
        hidden_states = project(
            "attn1.to_out.0", attended, residual=hidden_states, gate=attention_modulation[:, 2], first_rows=text_rows
        )
        normed = normalise("norm2", feed_forward_modulation, "ff.net.0.proj")
        inner = project("ff.net.0.proj", normed, activation="gelu_tanh")
        return project(
            "ff.net.2", inner, residual=hidden_states, gate=feed_forward_modulation[:, 2], first_rows=text_rows
        )


def _fold_norm(weight: jax.Array, bias: jax.Array, scale: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return scales and shifts [M, C] of a norm whose own weight and bias [C] are applied before the modulation's."""
    weight, bias = weight.astype(jnp.float32), bias.astype(jnp.float32)
    return weight * (1 + scale), bias * (1 + scale) + shift


def _embed_time(module: Any, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the embedding [1, E] of a timestep [1]."""
    temb = module.time_embedding(module.time_proj(timestep).to(dtype))
    if module.ofs_embedding is None:
        return temb
    return temb + module.ofs_embedding(module.ofs_proj(timestep * 0 + _OFFSET).to(dtype))


def _head_modulation(module: Any, temb: torch.Tensor) -> jax.Array:
    """Return shift and scale before the output, [2, C]."""
    return to_jax(module.norm_out.linear(module.norm_out.silu(temb))).reshape(2, -1)


def _positions(module: Any, grid: list[int], length: int) -> jax.Array | None:
    """Return the values added to the tokens, [length, C], zero for the text's, or None with RoPE."""
    config = module.config
    if config.use_learned_positional_embeddings:
        return pad_rows(to_jax(module.patch_embed.pos_embedding)[0], length)
    if config.use_rotary_positional_embeddings:
        return None
    channels = config.num_attention_heads * config.attention_head_dim
    frames, columns, rows = (jnp.asarray(axis) for axis in sine_embeddings(config, channels, grid))
    values = combine_axes([frames, rows, columns])
    time = frames.shape[1]
    side = rows.shape[1]
    # The columns' values come before the rows'.
    values = jnp.concatenate([values[:, :time], values[:, time + side :], values[:, time : time + side]], axis=1)
    return pad_rows(jnp.pad(values, ((TEXT_TOKENS, 0), (0, 0))), length)


def _rope_tables(config: Any, grid: list[int], length: int) -> tuple[jax.Array, jax.Array] | None:
    """Return cosines and sines of tokens' angles, each [length, D], for pairs (i, i + D/2); text isn't rotated."""
    if not config.use_rotary_positional_embeddings:
        return None
    angles = [jnp.asarray(np.asarray(axis)) for axis in rope_angles(config, grid)]
    padded = jnp.pad(combine_axes(angles), ((TEXT_TOKENS, 0), (0, 0)))
    cos, sin = jnp.cos(padded), jnp.sin(padded)
    tables = jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
    return pad_rows(tables[0], length), pad_rows(tables[1], length)


def _other_weights(module: Any) -> Params:
    """Return the weights outside the blocks, with the patch embedding as a matrix [C, patch values]."""
    return collect_linear(proj=module.patch_embed.proj, proj_out=module.proj_out) | {
        "norm_final.weight": to_jax(module.norm_final.weight),
        "norm_final.bias": to_jax(module.norm_final.bias),
        "norm_out.weight": to_jax(module.norm_out.norm.weight),
        "norm_out.bias": to_jax(module.norm_out.norm.bias),
    }
