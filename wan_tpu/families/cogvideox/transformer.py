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
from wan_tpu.families.shared.layers import SPLIT, linear, map_branches, rounded_type, scan_layers
from wan_tpu.families.shared.tokens import combine_axes, pad_rows, patchify
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.runtime.bridge import Params, call, to_jax
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, token_layout, weight_spec

MATRICES = r"transformer_blocks\..*\.(attn1\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))\.weight"
_SPLIT = rf"({MATRICES}|transformer_blocks\..*\.norm[12]\.linear\.weight)"
RULES = (
    Rule(_SPLIT, (SHARDS, None)),
    Rule(rf"(?!{_SPLIT}$).*", ()),
)
# Weights used before or right after attention, which takes most of a layer's time: they are gathered during the
# previous layer's attention.
_AHEAD = tuple(f"attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_BESIDE = ("ff.net.0.proj.weight", "ff.net.2.weight")  # Weights gathered while attention is computed.
_HEAD_EPS = 1e-6  # Epsilon of the norms of queries and keys: a constant of diffusers' block.
_OFFSET = 2.0  # The "ofs" input of 1.5's image-to-video model: a constant of the pipeline.


def embed_text(module: torch.nn.Module, params: Params, mesh: Mesh, text: jax.Array) -> dict[str, jax.Array]:
    """Turn the text's embeddings [B, 226, I] into tokens, "text" [B, 226, C]."""

    def method(module: Any, text: torch.Tensor) -> torch.Tensor:
        return module.patch_embed.text_proj(text)

    tokens = call(module, params, method, text)
    return {"text": jax.lax.with_sharding_constraint(tokens, text_sharding(mesh, text.shape[0]))}


def text_sharding(mesh: Mesh, branches: int) -> NamedSharding:
    """Return the sharding of the text's tokens: every device of a branch has all of them."""
    return NamedSharding(mesh, P(token_layout(mesh, branches, 1).branch_axis))


def predict(
    module: torch.nn.Module, params: Params, mesh: Mesh, latents: jax.Array, timestep: jax.Array, text: jax.Array
) -> jax.Array:
    """Return the transformer's prediction for each branch, as the video's tokens, float32 [B, L - 226, patch values].

    Args:
        module: The transformer.
        params: Its weights.
        mesh: The devices.
        latents: [1, C, T, H, W], in the dtype to compute in, the same for every branch; an image's latents follow on C.
        timestep: [1].
        text: [B, 226, C], from `embed_text`.
    """

    def method(module: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> jax.Array:
        config = module.config
        embedding = _embed_time(module, timestep, latents.dtype)
        patch = (config.patch_size_t or 1, config.patch_size, config.patch_size)
        grid = [n // p for n, p in zip(latents.shape[2:], patch, strict=True)]
        values = jnp.pad(patchify(to_jax(latents), patch), ((TEXT_TOKENS, 0), (0, 0)))
        layout = token_layout(mesh, text.shape[0], len(values))
        step = _Step(module, mesh, layout, len(values))
        tokens = step.run(
            _Inputs(
                values=pad_rows(values, layout.padded),
                positions=_positions(module, grid, layout.padded),
                tables=_rope_tables(config, grid, layout.padded),
                text=to_jax(text),
                embedding=jax.nn.silu(to_jax(embedding))[0],
                head=_head_modulation(module, embedding).astype(jnp.float32),
                blocks=to_jax(dict(module.transformer_blocks.template.named_parameters())),
                outer=_outer(module),
            )
        )
        return tokens[:, TEXT_TOKENS : len(values)]

    return call(module, params, method, latents, timestep, text)


class _Inputs(NamedTuple):
    """The inputs of one step's blocks; `_Step._specs` has their shardings.

    Attributes:
        values: [L, patch values], zero for the text.
        positions: [L, C], added to the tokens, or None.
        tables: Cosines and sines, two arrays [L, D], or None without RoPE.
        text: [B, 226, C].
        embedding: [E], of the time, after its activation.
        head: Shift and scale before the output, [2, C].
        blocks: The stacked weights of the layers.
        outer: The weights outside the layers.
    """

    values: jax.Array
    positions: jax.Array | None
    tables: tuple[jax.Array, jax.Array] | None
    text: jax.Array
    embedding: jax.Array
    head: jax.Array
    blocks: Params
    outer: Params


class _Step:
    """One step's blocks inside a `jax.shard_map`."""

    def __init__(self, module: Any, mesh: Mesh, layout: TokenLayout, tokens: int) -> None:
        config, self._logits = module.config, module.logits_dtype
        self._mesh, self._layout, self._tokens = mesh, layout, tokens
        self._heads, self._eps = config.num_attention_heads, config.norm_eps
        self._platform = mesh.devices.flat[0].platform
        self._groups = head_groups(mesh, self._heads)
        self._key_parts = key_parts(mesh, self._heads, config.attention_head_dim)
        self._query_scale = query_scale(config.attention_head_dim)
        self._ops: Ops = ops_for(self._platform)

    def run(self, inputs: _Inputs) -> jax.Array:
        """Return [B, L, patch values], float32, padding included."""
        self._blocks = {
            name: weight_spec(self._mesh, RULES, f"transformer_blocks.*.{name}", value.shape[1:], stacked=True)
            for name, value in inputs.blocks.items()
        }
        branches, axis = inputs.text.shape[0], self._layout.branch_axis
        self._local_branches = branches // (self._mesh.shape["dp"] if axis else 1)
        local = jax.shard_map(
            self._local, mesh=self._mesh, in_specs=(self._specs(inputs),), out_specs=self._layout.spec, check_vma=False
        )
        return local(inputs)

    def _specs(self, inputs: _Inputs) -> _Inputs:
        tokens, text = P(self._layout.token_axes), text_sharding(self._mesh, inputs.text.shape[0]).spec
        positions, tables = inputs.positions, inputs.tables
        return _Inputs(
            tokens,  # type: ignore[arg-type]
            None if positions is None else tokens,  # type: ignore[arg-type]
            None if tables is None else (tokens, tokens),  # type: ignore[arg-type]
            text,  # type: ignore[arg-type]
            P(),  # type: ignore[arg-type]
            P(),  # type: ignore[arg-type]
            self._blocks,  # type: ignore[arg-type]
            P(),  # type: ignore[arg-type]
        )

    def _local(self, inputs: _Inputs) -> jax.Array:
        ops, outer = self._ops, inputs.outer
        start = jax.lax.axis_index(self._layout.token_axes) * len(inputs.values)
        text_rows = TEXT_TOKENS - start  # How many of this device's first rows belong to the text.

        def embed(text: jax.Array) -> jax.Array:
            """Return this device's tokens [t, C], with the text's [226, C]."""
            rows = jnp.pad(text, ((0, len(inputs.values)), (0, 0)))
            rows = jax.lax.dynamic_slice_in_dim(rows, jnp.minimum(start, TEXT_TOKENS), len(inputs.values))
            video = ops.linear(inputs.values, outer["proj.weight"], outer["proj.bias"])
            tokens = jnp.where(jnp.arange(len(rows))[:, None] < text_rows, rows, video)
            return tokens if inputs.positions is None else tokens + inputs.positions.astype(tokens.dtype)

        modulations = [self._modulations(f"{name}.linear", inputs) for name in ("norm1", "norm2")]

        def layer(hidden: jax.Array, weights: Params, index: jax.Array) -> jax.Array:
            first, second = (jax.lax.dynamic_index_in_dim(table, index, keepdims=False) for table in modulations)
            return map_branches(lambda x: self._block(x, weights, first, second, inputs.tables, text_rows), hidden)

        hidden = scan_layers(
            layer,
            map_branches(embed, jnp.broadcast_to(inputs.text, (self._local_branches, *inputs.text.shape[1:]))),
            {name: value for name, value in inputs.blocks.items() if ".linear." not in name},
            self._blocks,
            depth=len(inputs.blocks["norm1.norm.weight"]),
            ahead=_AHEAD,
            platform=self._platform,
        )
        shift, scale = inputs.head
        scale, shift = _fold_norm(outer["norm_out.weight"], outer["norm_out.bias"], scale[None], shift[None])

        def head(hidden: jax.Array) -> jax.Array:
            final = outer["norm_final.weight"][None], outer["norm_final.bias"][None]
            normed = ops.layer_norm(ops.layer_norm(hidden, *final, eps=self._eps), scale, shift, eps=self._eps)
            return ops.linear(normed, outer["proj_out.weight"], outer["proj_out.bias"]).astype(jnp.float32)

        return map_branches(head, hidden)

    def _modulations(self, name: str, inputs: _Inputs) -> jax.Array:
        """Return every layer's shift, scale and gate of the text's tokens and the video's, float32 [layers, 2, 3, C].

        They are computed at once, before the layers, by a product with split matrices whose results are gathered, not
        the matrices.
        """
        weight, bias = inputs.blocks[f"{name}.weight"], inputs.blocks[f"{name}.bias"]
        embedding = inputs.embedding.astype(weight.dtype)
        product = jnp.einsum("loe,e->lo", weight, embedding, preferred_element_type=jnp.float32)
        if self._blocks[f"{name}.weight"] == SPLIT:
            product = jax.lax.all_gather(product, SHARDS, axis=1, tiled=True)
        modulations = product + bias.astype(jnp.float32)
        return modulations.reshape(len(modulations), 2, 3, -1)[:, ::-1]

    def _block(
        self,
        x: jax.Array,
        w: Params,
        attention_table: jax.Array,
        feed_forward_table: jax.Array,
        tables: tuple[jax.Array, jax.Array] | None,
        text_rows: jax.Array,
    ) -> jax.Array:
        """Run one layer on this device's tokens of one branch, as in diffusers' CogVideoXBlock.

        Args:
            x: [t, C].
            w: The layer's weights.
            attention_table, feed_forward_table: [2, 3, C], from `_modulations`.
            tables: As in `_Inputs`.
            text_rows: How many of the first rows belong to the text.
        """
        ops = self._ops

        def project(name: str, x: Any, **options: Any) -> jax.Array:
            return linear(ops, w, name, x, **options)

        def normalise(name: str, table: jax.Array, target: str) -> Any:
            """Apply the norm `name` to the inputs of the linear layer `target`."""
            folded = _fold_norm(w[f"{name}.norm.weight"], w[f"{name}.norm.bias"], table[:, 1], table[:, 0])
            return ops.layer_norm(x, *folded, eps=self._eps, first_rows=text_rows, rounded=rounded_type(w, target))

        def rotate(name: str, rows: Any, scale: float, **options: Any) -> Any:
            vectors = (w[f"attn1.norm_{name}.{part}"].astype(jnp.float32) * scale for part in ("weight", "bias"))
            options = {"eps": _HEAD_EPS, "groups": self._groups} | options
            return ops.head_norm_rope(project(f"attn1.to_{name}", rows), *vectors, tables, **options)

        attended, _, gathered = exchanged_attention(
            normalise("norm1", attention_table, "attn1.to_q"),
            Projections(
                query=lambda rows: rotate("q", rows, self._query_scale),
                key=lambda rows: rotate("k", rows, 1, parts=self._key_parts),
                value=lambda rows: project("attn1.to_v", rows, groups=self._groups),
            ),
            heads=self._heads,
            kv_len=self._tokens,
            token_axes=self._layout.token_axes,
            platform=self._platform,
            beside=[{name: w[name]} for name in _BESIDE],
            qk=self._logits,
        )
        w = w | gathered
        x = project("attn1.to_out.0", attended, residual=x, gate=attention_table[:, 2], first_rows=text_rows)
        normed = normalise("norm2", feed_forward_table, "ff.net.0.proj")
        inner = project("ff.net.0.proj", normed, activation="gelu_tanh")
        return project("ff.net.2", inner, residual=x, gate=feed_forward_table[:, 2], first_rows=text_rows)


def _fold_norm(weight: jax.Array, bias: jax.Array, scale: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return scales and shifts [M, C] of a norm whose own weight and bias [C] are applied before the modulation's."""
    weight, bias = weight.astype(jnp.float32), bias.astype(jnp.float32)
    return weight * (1 + scale), bias * (1 + scale) + shift


def _embed_time(module: Any, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the embedding [1, E] of a timestep [1]."""
    embedding = module.time_embedding(module.time_proj(timestep).to(dtype))
    if module.ofs_embedding is None:
        return embedding
    return embedding + module.ofs_embedding(module.ofs_proj(timestep * 0 + _OFFSET).to(dtype))


def _head_modulation(module: Any, embedding: torch.Tensor) -> jax.Array:
    """Return shift and scale before the output, [2, C]."""
    return to_jax(module.norm_out.linear(module.norm_out.silu(embedding))).reshape(2, -1)


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


def _outer(module: Any) -> Params:
    """Return the weights outside the blocks, with the patch embedding as a matrix [C, patch values]."""
    weight = to_jax(module.patch_embed.proj.weight)
    bias = module.patch_embed.proj.bias
    return {
        "proj.weight": weight.reshape(weight.shape[0], -1),
        "proj.bias": jnp.zeros(weight.shape[0], weight.dtype) if bias is None else to_jax(bias),
        "norm_final.weight": to_jax(module.norm_final.weight),
        "norm_final.bias": to_jax(module.norm_final.bias),
        "norm_out.weight": to_jax(module.norm_out.norm.weight),
        "norm_out.bias": to_jax(module.norm_out.norm.bias),
        "proj_out.weight": to_jax(module.proj_out.weight),
        "proj_out.bias": to_jax(module.proj_out.bias),
    }
