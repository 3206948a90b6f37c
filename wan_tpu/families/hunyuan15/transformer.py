"""A HunyuanVideo-1.5 transformer as a program for slices: diffusers' parameters and arithmetic, all of it split.

Video and context (what `context` makes of prompt, quoted text and image) are two streams with weights of their own that
meet in attention. The video's tokens are spread over the devices, and its weights gathered layer by layer while earlier
ones are in use. The context has 2,000 tokens where the video has 100,000: every device of a branch has all of them, and
of their weights its own heads and hidden units alone; what these give is summed over 'tp'. The linear layers that make
the modulations, a third of the model, are not gathered either: each device multiplies by its part.

Shapes: B branches of guidance, T H W latent frames, height, width, L tokens of the video, t those of one device, K
tokens of the context, N heads, D head width, C = N*D channels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.families.hunyuan15.context import Given, context, embed_time
from wan_tpu.families.shared.layers import SPLIT, linear, rounded_to, scan_layers
from wan_tpu.families.shared.tokens import on_grid, padded, patches
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, ReplicatedTokens, exchanged_attention, head_groups, key_parts
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, token_layout, weight_spec

_BLOCK = r"transformer_blocks\..*\."
_LINEAR = r"attn\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)"
_VIDEO = rf"({_LINEAR}|norm1\.linear|norm1_context\.linear)\.weight"
_HEADS = r"(attn\.add_(q|k|v)_proj|ff_context\.net\.0\.proj)"  # split by outputs
_SUMS = r"(attn\.to_add_out|ff_context\.net\.2)\.weight"  # split by inputs, the outputs of those
MATRICES = rf"{_BLOCK}({_LINEAR}|{_HEADS})\.weight"
RULES = (
    Rule(rf"{_BLOCK}{_VIDEO}", (SHARDS, None)),
    Rule(rf"{_BLOCK}{_HEADS}\.weight", ("tp", None)),
    Rule(rf"{_BLOCK}{_HEADS}\.(bias|weight_scale)", ("tp",)),
    Rule(rf"{_BLOCK}{_SUMS}", (None, "tp")),
    Rule(rf"(?!{_BLOCK}({_VIDEO}|{_HEADS}\.(weight|bias|weight_scale)|{_SUMS})$).*", ()),
)
# Used before or right after attention, which takes most of a layer: gathered during that of the layer before.
_AHEAD = tuple(f"attn.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_BESIDE = ("ff.net.0.proj.weight", "ff.net.2.weight")  # gathered while attention is computed
_EPS = 1e-6  # of every norm: a constant of diffusers' block
_STREAMS = ("norm1", "norm1_context")


def predict(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    latents: jax.Array,
    timestep: jax.Array,
    following: jax.Array,
    given: Given,
) -> jax.Array:
    """Return what the transformer predicts of each branch as tokens, float32 [B, L, C of the latents].

    latents    [1, 2C + 1, T, H, W] in the dtype to compute in: latents, the image's, and the mask
    timestep   float32 [1]; following  the next step's, 0 after the last (asked for by a meanflow model alone)
    """

    def method(module: Any, latents: torch.Tensor) -> jax.Array:
        values = patches(to_jax(latents), (1, 1, 1))
        around, count = context(module, given, timestep)
        embedding = embed_time(module, timestep, following, latents.dtype)
        layout = token_layout(mesh, len(around), len(values))
        step = _Step(module.config, mesh, layout, len(values))
        head = to_jax(module.norm_out.linear(module.norm_out.silu(to_torch(embedding))))
        found = step.run(
            Inputs(
                values=padded(values, layout.padded),
                tables=_rope_tables(module.config, latents.shape[2:], layout.padded),
                context=around,
                context_tokens=count,
                embedding=jax.nn.silu(embedding)[0],
                head=head.reshape(2, -1).astype(jnp.float32),
                blocks=to_jax(dict(module.transformer_blocks.template.named_parameters())),
                outer=_outer(module),
            )
        )
        return found[:, : len(values)]

    return call(module, params, method, latents)


class Inputs(NamedTuple):
    """What the blocks of one step work on; see `_Step.run` for where each lies.

    values     [L, channels of the input]; tables  two [L, D]
    context    [B, K, C]; context_tokens  int32 [B], how many of them are there
    embedding  [C], of the time, after its activation; head  scale and shift [2, C]
    blocks     stacked weights of the layers; outer  those around them
    """

    values: jax.Array
    tables: tuple[jax.Array, jax.Array]
    context: jax.Array
    context_tokens: jax.Array
    embedding: jax.Array
    head: jax.Array
    blocks: Params
    outer: Params


class _Step:
    """One step's blocks inside a `jax.shard_map`."""

    def __init__(self, config: Any, mesh: Mesh, layout: TokenLayout, tokens: int) -> None:
        self._mesh, self._layout, self._tokens = mesh, layout, tokens
        self._heads = config.num_attention_heads
        self._platform = mesh.devices.flat[0].platform
        self._groups = head_groups(mesh, self._heads)
        self._key_parts = key_parts(mesh, self._heads, config.attention_head_dim)
        self._query_scale = query_scale(config.attention_head_dim)
        self._ops: Ops = ops_for(self._platform)

    def run(self, given: Inputs) -> jax.Array:
        """Return [B, L, C of the latents], float32, padding included."""
        self._blocks = {
            name: weight_spec(self._mesh, RULES, f"transformer_blocks.*.{name}", value.shape[1:], stacked=True)
            for name, value in given.blocks.items()
        }
        tokens, branch = P(self._layout.token_axes), P(self._layout.branch_axis)
        specs = Inputs(tokens, (tokens, tokens), branch, branch, P(), P(), self._blocks, P())  # type: ignore[arg-type]
        local = jax.shard_map(
            self._local, mesh=self._mesh, in_specs=(specs,), out_specs=self._layout.spec, check_vma=False
        )
        return local(given)

    def _local(self, given: Inputs) -> jax.Array:
        ops, outer = self._ops, given.outer
        video = ops.linear(given.values, outer["x_embedder.weight"], outer["x_embedder.bias"])
        modulations = [self._modulations(f"{name}.linear", given) for name in _STREAMS]

        def layer(hidden: Any, weights: Params, index: jax.Array) -> Any:
            tables = [jax.lax.dynamic_index_in_dim(table, index, keepdims=False) for table in modulations]

            def one(streams: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                return self._block(*streams, weights, tables, given.tables)

            return jax.lax.map(one, (*hidden, given.context_tokens))

        branches = len(given.context)
        hidden, _ = scan_layers(
            layer,
            (jnp.broadcast_to(video, (branches, *video.shape)), given.context),
            {name: value for name, value in given.blocks.items() if ".linear." not in name},
            self._blocks,
            depth=len(given.blocks["norm1.linear.bias"]),
            ahead=_AHEAD,
            platform=self._platform,
        )
        scale, shift = given.head

        def head(hidden: jax.Array) -> jax.Array:
            normed = ops.layer_norm(hidden, 1 + scale[None], shift[None], eps=_EPS)
            return ops.linear(normed, outer["proj_out.weight"], outer["proj_out.bias"]).astype(jnp.float32)

        return jax.lax.map(head, hidden)

    def _modulations(self, name: str, given: Inputs) -> jax.Array:
        """Return every layer's shift, scale and gate of attention and feed-forward, float32 [layers, 6, C].

        All at once, before the layers: a product with split matrices, and its results are gathered, not the matrices.
        """
        weight, bias = given.blocks[f"{name}.weight"], given.blocks[f"{name}.bias"]
        product = jnp.einsum(
            "loe,e->lo", weight, given.embedding.astype(weight.dtype), preferred_element_type=jnp.float32
        )
        if self._blocks[f"{name}.weight"] == SPLIT:
            product = jax.lax.all_gather(product, SHARDS, axis=1, tiled=True)
        return (product + bias.astype(jnp.float32)).reshape(len(product), 6, -1)

    def _block(
        self,
        x: jax.Array,
        around: jax.Array,
        count: jax.Array,
        w: Params,
        modulations: list[jax.Array],
        tables: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """One layer of one branch; the formula is diffusers' HunyuanVideo15TransformerBlock.

        x [t, C] of the video; around [K, C], of which `count` are there; modulations [6, C] of both
        """
        ops = self._ops
        of_video, of_context = ([row[None] for row in table] for table in modulations)

        def of(name: str, x: Any, **more: Any) -> jax.Array:
            return linear(ops, w, name, x, **more)

        def normed(x: jax.Array, table: list[jax.Array], feeds: str) -> Any:
            """Normalise, with the shift and the scale that a table begins with."""
            return ops.layer_norm(x, 1 + table[1], table[0], eps=_EPS, rounded=rounded_to(w, feeds))

        def turned(name: str, norm: str, rows: Any, scale: float, **more: Any) -> Any:
            weight = w[f"attn.{norm}.weight"].astype(jnp.float32) * scale
            return ops.head_norm_rope(of(f"attn.{name}", rows), weight, None, eps=_EPS, **more)

        def summed(name: str, x: jax.Array, residual: jax.Array, gate: jax.Array) -> jax.Array:
            """Residual and what this device's heads or hidden units, and all others', add to it."""
            product = jnp.einsum("ki,oi->ko", x, w[f"{name}.weight"], preferred_element_type=jnp.float32)
            if self._blocks[f"{name}.weight"][2] == "tp":
                product = jax.lax.psum(product, "tp")
            product = product + w[f"{name}.bias"].astype(jnp.float32)
            return (residual.astype(jnp.float32) + gate * product).astype(x.dtype)

        context = normed(around, of_context, "attn.add_q_proj")
        mixed, other, gathered = exchanged_attention(
            normed(x, of_video, "attn.to_q"),
            Projections(
                query=lambda rows: turned(
                    "to_q", "norm_q", rows, self._query_scale, tables=tables, groups=self._groups
                ),
                key=lambda rows: turned(
                    "to_k", "norm_k", rows, 1, tables=tables, groups=self._groups, parts=self._key_parts
                ),
                value=lambda rows: of("attn.to_v", rows, groups=self._groups),
            ),
            heads=self._heads,
            kv_len=self._tokens + count,
            token_axes=self._layout.token_axes,
            platform=self._platform,
            beside=[{name: w[name]} for name in _BESIDE],
            others=ReplicatedTokens(
                turned("add_q_proj", "norm_added_q", context, self._query_scale, tables=None),
                turned("add_k_proj", "norm_added_k", context, 1, tables=None),
                of("attn.add_v_proj", context),
                after=self._tokens,
            ),
        )
        w = w | gathered
        assert other is not None
        x = of("attn.to_out.0", mixed, residual=x, gate=of_video[2])
        inner = of("ff.net.0.proj", normed(x, of_video[3:], "ff.net.0.proj"), activation="gelu_tanh")
        x = of("ff.net.2", inner, residual=x, gate=of_video[5])
        around = summed("attn.to_add_out", other, around, of_context[2])
        context = normed(around, of_context[3:], "ff_context.net.0.proj")
        inner = of("ff_context.net.0.proj", context, activation="gelu_tanh")
        around = summed("ff_context.net.2", inner, around, of_context[5])
        return x, around


def _rope_tables(config: Any, grid: tuple[int, ...], length: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the video's angles, each [length, D], for pairs (i, i + D/2)."""
    axes = []
    for places, width in zip(grid, config.rope_axes_dim, strict=True):
        speeds = 1 / config.rope_theta ** (jnp.arange(0, width, 2, dtype=jnp.float32) / width)
        axes.append(jnp.arange(places, dtype=jnp.float32)[:, None] * speeds)
    angles = on_grid(axes)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    tables = jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
    return padded(tables[0], length), padded(tables[1], length)


def _outer(module: Any) -> Params:
    """The weights around the blocks; the patch embedding as a matrix [C, channels of the input]."""
    weight = to_jax(module.x_embedder.proj.weight)
    return {
        "x_embedder.weight": weight.reshape(weight.shape[0], -1),
        "x_embedder.bias": to_jax(module.x_embedder.proj.bias),
        "proj_out.weight": to_jax(module.proj_out.weight),
        "proj_out.bias": to_jax(module.proj_out.bias),
    }
