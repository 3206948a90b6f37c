"""A CogVideoX transformer as a program for slices: diffusers' parameters and arithmetic, tokens and weights split.

Text and video are one sequence, the text's 226 tokens first, with weights in common and a modulation of their own. As
in the other families norms, gates, activations and residuals are fused into what reads or writes them, queries and keys
pair channels (i, i + D/2) for RoPE, and each layer's weights are gathered while earlier ones are in use. The linear
layers that make the modulations, a seventh of the model, are not: each device multiplies by its part, and the results
are gathered.

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

from wan_tpu.families.cogvideox.positions import rope_angles, sums_of_sines
from wan_tpu.families.cogvideox.presets import TEXT_TOKENS
from wan_tpu.families.shared.layers import SPLIT, each, linear, rounded_to, scan_layers
from wan_tpu.families.shared.tokens import on_grid, padded, patches
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.runtime.bridge import Params, call, to_jax
from wan_tpu.runtime.components import LOGITS
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, token_layout, weight_spec

MATRICES = r"transformer_blocks\..*\.(attn1\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))\.weight"
_SPLIT = rf"({MATRICES}|transformer_blocks\..*\.norm[12]\.linear\.weight)"
RULES = (
    Rule(_SPLIT, (SHARDS, None)),
    Rule(rf"(?!{_SPLIT}$).*", ()),
)
# Used before or right after attention, which takes most of a layer: gathered during that of the layer before.
_AHEAD = tuple(f"attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_BESIDE = ("ff.net.0.proj.weight", "ff.net.2.weight")  # gathered while attention is computed
_HEAD_EPS = 1e-6  # of the norms of queries and keys: a constant of diffusers' block
_OFFSET = 2.0  # "ofs", which 1.5's image-to-video model is told: a constant of the pipeline


def embed_text(module: torch.nn.Module, params: Params, mesh: Mesh, text: jax.Array) -> dict[str, jax.Array]:
    """Return the text as tokens, "text" [B, 226, C]; text: embeddings [B, 226, I]."""

    def method(module: Any, text: torch.Tensor) -> torch.Tensor:
        return module.patch_embed.text_proj(text)

    found = call(module, params, method, text)
    return {"text": jax.lax.with_sharding_constraint(found, text_sharding(mesh, text.shape[0]))}


def text_sharding(mesh: Mesh, branches: int) -> NamedSharding:
    """Return where the text's tokens lie: whole wherever their branch is computed."""
    return NamedSharding(mesh, P(token_layout(mesh, branches, 1).branch_axis))


def predict(
    module: torch.nn.Module, params: Params, mesh: Mesh, latents: jax.Array, timestep: jax.Array, text: jax.Array
) -> jax.Array:
    """Return what the transformer predicts of each branch as tokens of the video, float32 [B, L - 226, patch values].

    latents  [1, C, T, H, W] in the dtype to compute in, an image's beside them on C, the same for every branch
    timestep [1]; text  [B, 226, C] from `embed_text`
    """

    def method(module: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> jax.Array:
        config = module.config
        embedding = _embed_time(module, timestep, latents.dtype)
        patch = (config.patch_size_t or 1, config.patch_size, config.patch_size)
        grid = [n // p for n, p in zip(latents.shape[2:], patch, strict=True)]
        values = jnp.pad(patches(to_jax(latents), patch), ((TEXT_TOKENS, 0), (0, 0)))
        layout = token_layout(mesh, text.shape[0], len(values))
        step = _Step(module, mesh, layout, len(values))
        found = step.run(
            Inputs(
                values=padded(values, layout.padded),
                positions=_positions(module, grid, layout.padded),
                tables=_rope_tables(config, grid, layout.padded),
                text=to_jax(text),
                embedding=jax.nn.silu(to_jax(embedding))[0],
                head=_head_modulation(module, embedding).astype(jnp.float32),
                blocks=to_jax(dict(module.transformer_blocks.template.named_parameters())),
                outer=_outer(module),
            )
        )
        return found[:, TEXT_TOKENS : len(values)]

    return call(module, params, method, latents, timestep, text)


def unpatchify(tokens: jax.Array, latent_shape: tuple[int, ...], patch: tuple[int, int, int]) -> jax.Array:
    """Lay the video's tokens [L - 226, patch values] out as latents [1, C, T, H, W]."""
    grid = [n // p for n, p in zip(latent_shape[2:], patch, strict=True)]
    array = tokens.reshape(1, *grid, latent_shape[1], *patch)
    return array.transpose(0, 4, 1, 5, 2, 6, 3, 7).reshape(latent_shape)


class Inputs(NamedTuple):
    """What the blocks of one step work on; see `_Step.specs` for where each lies.

    values     [L, patch values], zero for the text; positions  [L, C], what is added to the tokens, or None
    tables     two [L, D], or None without RoPE; text  [B, 226, C]
    embedding  [E], of the time, after its activation; head  shift and scale [2, C]
    blocks     stacked weights of the layers; outer  those around them
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
        config, self._logits = module.config, getattr(module, LOGITS, None)
        self._mesh, self._layout, self._tokens = mesh, layout, tokens
        self._heads, self._eps = config.num_attention_heads, config.norm_eps
        self._platform = mesh.devices.flat[0].platform
        self._groups = head_groups(mesh, self._heads)
        self._key_parts = key_parts(mesh, self._heads, config.attention_head_dim)
        self._query_scale = query_scale(config.attention_head_dim)
        self._ops: Ops = ops_for(self._platform)

    def run(self, given: Inputs) -> jax.Array:
        """Return [B, L, patch values], float32, padding included."""
        self._blocks = {
            name: weight_spec(self._mesh, RULES, f"transformer_blocks.*.{name}", value.shape[1:], stacked=True)
            for name, value in given.blocks.items()
        }
        branches, axis = given.text.shape[0], self._layout.branch_axis
        self._local_branches = branches // (self._mesh.shape["dp"] if axis else 1)
        local = jax.shard_map(
            self._local, mesh=self._mesh, in_specs=(self._specs(given),), out_specs=self._layout.spec, check_vma=False
        )
        return local(given)

    def _specs(self, given: Inputs) -> Inputs:
        tokens, text = P(self._layout.token_axes), text_sharding(self._mesh, given.text.shape[0]).spec
        positions, tables = given.positions, given.tables
        return Inputs(
            tokens,  # type: ignore[arg-type]
            None if positions is None else tokens,  # type: ignore[arg-type]
            None if tables is None else (tokens, tokens),  # type: ignore[arg-type]
            text,  # type: ignore[arg-type]
            P(),  # type: ignore[arg-type]
            P(),  # type: ignore[arg-type]
            self._blocks,  # type: ignore[arg-type]
            P(),  # type: ignore[arg-type]
        )

    def _local(self, given: Inputs) -> jax.Array:
        ops, outer = self._ops, given.outer
        start = jax.lax.axis_index(self._layout.token_axes) * len(given.values)
        of_text = TEXT_TOKENS - start  # this device's first rows

        def embed(text: jax.Array) -> jax.Array:
            """text [226, C] -> this device's tokens [t, C]."""
            rows = jnp.pad(text, ((0, len(given.values)), (0, 0)))
            rows = jax.lax.dynamic_slice_in_dim(rows, jnp.minimum(start, TEXT_TOKENS), len(given.values))
            video = ops.linear(given.values, outer["proj.weight"], outer["proj.bias"])
            found = jnp.where(jnp.arange(len(rows))[:, None] < of_text, rows, video)
            return found if given.positions is None else found + given.positions.astype(found.dtype)

        modulations = [self._modulations(f"{name}.linear", given) for name in ("norm1", "norm2")]

        def layer(hidden: jax.Array, weights: Params, index: jax.Array) -> jax.Array:
            first, second = (jax.lax.dynamic_index_in_dim(table, index, keepdims=False) for table in modulations)
            return each(lambda x: self._block(x, weights, first, second, given.tables, of_text), hidden)

        hidden = scan_layers(
            layer,
            each(embed, jnp.broadcast_to(given.text, (self._local_branches, *given.text.shape[1:]))),
            {name: value for name, value in given.blocks.items() if ".linear." not in name},
            self._blocks,
            depth=len(given.blocks["norm1.norm.weight"]),
            ahead=_AHEAD,
            platform=self._platform,
        )
        shift, scale = given.head
        scale, shift = _folded(outer["norm_out.weight"], outer["norm_out.bias"], scale[None], shift[None])

        def head(hidden: jax.Array) -> jax.Array:
            final = outer["norm_final.weight"][None], outer["norm_final.bias"][None]
            normed = ops.layer_norm(ops.layer_norm(hidden, *final, eps=self._eps), scale, shift, eps=self._eps)
            return ops.linear(normed, outer["proj_out.weight"], outer["proj_out.bias"]).astype(jnp.float32)

        return each(head, hidden)

    def _modulations(self, name: str, given: Inputs) -> jax.Array:
        """Return every layer's shift, scale and gate of the text's tokens and the video's, float32 [layers, 2, 3, C].

        All at once, before the layers: a product with split matrices, and its results are gathered, not the matrices.
        """
        weight, bias = given.blocks[f"{name}.weight"], given.blocks[f"{name}.bias"]
        embedding = given.embedding.astype(weight.dtype)
        product = jnp.einsum("loe,e->lo", weight, embedding, preferred_element_type=jnp.float32)
        if self._blocks[f"{name}.weight"] == SPLIT:
            product = jax.lax.all_gather(product, SHARDS, axis=1, tiled=True)
        made = product + bias.astype(jnp.float32)
        return made.reshape(len(made), 2, 3, -1)[:, ::-1]

    def _block(
        self,
        x: jax.Array,
        w: Params,
        attention_table: jax.Array,
        feed_forward_table: jax.Array,
        tables: tuple[jax.Array, jax.Array] | None,
        of_text: jax.Array,
    ) -> jax.Array:
        """One layer on this device's tokens of one branch; the formula is diffusers' CogVideoXBlock.

        x [t, C]; two tables [2, 3, C] from `_modulations`; tables as in `Inputs`; of_text: how many rows are the text's
        """
        ops = self._ops

        def of(name: str, x: Any, **more: Any) -> jax.Array:
            return linear(ops, w, name, x, **more)

        def normed(name: str, table: jax.Array, feeds: str) -> Any:
            folded = _folded(w[f"{name}.norm.weight"], w[f"{name}.norm.bias"], table[:, 1], table[:, 0])
            return ops.layer_norm(x, *folded, eps=self._eps, first_rows=of_text, rounded=rounded_to(w, feeds))

        def turned(name: str, rows: Any, scale: float, **more: Any) -> Any:
            vectors = (w[f"attn1.norm_{name}.{part}"].astype(jnp.float32) * scale for part in ("weight", "bias"))
            rest = {"eps": _HEAD_EPS, "groups": self._groups} | more
            return ops.head_norm_rope(of(f"attn1.to_{name}", rows), *vectors, tables, **rest)

        mixed, _, gathered = exchanged_attention(
            normed("norm1", attention_table, "attn1.to_q"),
            Projections(
                query=lambda rows: turned("q", rows, self._query_scale),
                key=lambda rows: turned("k", rows, 1, parts=self._key_parts),
                value=lambda rows: of("attn1.to_v", rows, groups=self._groups),
            ),
            heads=self._heads,
            kv_len=self._tokens,
            token_axes=self._layout.token_axes,
            platform=self._platform,
            beside=[{name: w[name]} for name in _BESIDE],
            qk=self._logits,
        )
        w = w | gathered
        x = of("attn1.to_out.0", mixed, residual=x, gate=attention_table[:, 2], first_rows=of_text)
        inner = of("ff.net.0.proj", normed("norm2", feed_forward_table, "ff.net.0.proj"), activation="gelu_tanh")
        return of("ff.net.2", inner, residual=x, gate=feed_forward_table[:, 2], first_rows=of_text)


def _folded(weight: jax.Array, bias: jax.Array, scale: jax.Array, shift: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return scales and shifts [M, C] of a norm whose own weight and bias [C] come before the modulation's."""
    weight, bias = weight.astype(jnp.float32), bias.astype(jnp.float32)
    return weight * (1 + scale), bias * (1 + scale) + shift


def _embed_time(module: Any, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """timestep [1] -> embedding [1, E]."""
    embedding = module.time_embedding(module.time_proj(timestep).to(dtype))
    if module.ofs_embedding is None:
        return embedding
    return embedding + module.ofs_embedding(module.ofs_proj(timestep * 0 + _OFFSET).to(dtype))


def _head_modulation(module: Any, embedding: torch.Tensor) -> jax.Array:
    """Shift and scale before the output, [2, C]."""
    return to_jax(module.norm_out.linear(module.norm_out.silu(embedding))).reshape(2, -1)


def _positions(module: Any, grid: list[int], length: int) -> jax.Array | None:
    """What is added to the tokens, [length, C]; the text's stay as they are."""
    config = module.config
    if config.use_learned_positional_embeddings:
        return padded(to_jax(module.patch_embed.pos_embedding)[0], length)
    if config.use_rotary_positional_embeddings:
        return None
    channels = config.num_attention_heads * config.attention_head_dim
    frames, columns, rows = (jnp.asarray(axis) for axis in sums_of_sines(config, channels, grid))
    found = on_grid([frames, rows, columns])
    time = frames.shape[1]
    side = rows.shape[1]  # the columns' come first
    found = jnp.concatenate([found[:, :time], found[:, time + side :], found[:, time : time + side]], axis=1)
    return padded(jnp.pad(found, ((TEXT_TOKENS, 0), (0, 0))), length)


def _rope_tables(config: Any, grid: list[int], length: int) -> tuple[jax.Array, jax.Array] | None:
    """Cosines and sines of tokens' angles, each [length, D], for pairs (i, i + D/2); the text isn't turned."""
    if not config.use_rotary_positional_embeddings:
        return None
    angles = [jnp.asarray(np.asarray(axis)) for axis in rope_angles(config, grid)]
    turned = jnp.pad(on_grid(angles), ((TEXT_TOKENS, 0), (0, 0)))
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    tables = jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
    return padded(tables[0], length), padded(tables[1], length)


def _outer(module: Any) -> Params:
    """The weights around the blocks; the patch embedding as a matrix [C, patch values]."""
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
