"""A HunyuanVideo-1.5 transformer as a program for slices: diffusers' parameters and arithmetic, split over the mesh.

Video and context (prompt, quoted text and image, see context.py) are two streams with separate weights that meet in
attention. The video's tokens are spread over the devices, and its weights are gathered layer by layer while earlier
ones are in use. The context has 2,000 tokens where the video has 100,000: every device of a branch has all of them, but
only its own heads and hidden units of their weights, whose results are summed over 'tp'. The linear layers of the
modulations, a third of the model, aren't gathered either: each device multiplies by its part.

Shapes: B branches of guidance, T H W latent frames, height, width, L tokens of the video, t those of one device, K
tokens of the context, N heads, D head width, C = N*D channels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.families.hunyuan15.context import Encodings, embed_time, make_context
from wan_tpu.families.shared.layers import SPLIT, linear, rounded_type, scan_layers
from wan_tpu.families.shared.tokens import combine_axes, pad_rows, patchify
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, ReplicatedTokens, exchanged_attention, head_groups, key_parts
from wan_tpu.runtime.bridge import Params, call, to_jax, to_torch
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, token_layout, weight_spec

_BLOCK = r"transformer_blocks\..*\."
_LINEAR = r"attn\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)"
_VIDEO = rf"({_LINEAR}|norm1\.linear|norm1_context\.linear)\.weight"
_HEADS = r"(attn\.add_(q|k|v)_proj|ff_context\.net\.0\.proj)"  # These are split by outputs.
_SUMS = r"(attn\.to_add_out|ff_context\.net\.2)\.weight"  # These are split by inputs, the outputs of `_HEADS`.
MATRICES = rf"{_BLOCK}({_LINEAR}|{_HEADS})\.weight"
RULES = (
    Rule(rf"{_BLOCK}{_VIDEO}", (SHARDS, None)),
    Rule(rf"{_BLOCK}{_HEADS}\.weight", ("tp", None)),
    Rule(rf"{_BLOCK}{_HEADS}\.(bias|weight_scale)", ("tp",)),
    Rule(rf"{_BLOCK}{_SUMS}", (None, "tp")),
    Rule(rf"(?!{_BLOCK}({_VIDEO}|{_HEADS}\.(weight|bias|weight_scale)|{_SUMS})$).*", ()),
)
# Weights used before or right after attention, which takes most of a layer's time: they are gathered during the
# previous layer's attention.
_AHEAD = tuple(f"attn.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_BESIDE = ("ff.net.0.proj.weight", "ff.net.2.weight")  # Weights gathered while attention is computed.
_EPS = 1e-6  # Epsilon of every norm: a constant of diffusers' block.
_STREAMS = ("norm1", "norm1_context")


def predict(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    latents: jax.Array,
    timestep: jax.Array,
    following: jax.Array,
    encodings: Encodings,
) -> jax.Array:
    """Return the transformer's prediction for each branch as tokens, float32 [B, L, C of the latents].

    Args:
        module: The transformer.
        params: Its weights.
        mesh: The devices.
        latents: [1, 2C + 1, T, H, W], in the dtype to compute in: latents, the image's, and the mask.
        timestep: float32 [1].
        following: float32 [1], the next step's timestep, 0 after the last; only meanflow models use it.
        encodings: The encoders' outputs.
    """

    def method(module: Any, latents: torch.Tensor) -> jax.Array:
        values = patchify(to_jax(latents), (1, 1, 1))
        context, count = make_context(module, encodings, timestep)
        embedding = embed_time(module, timestep, following, latents.dtype)
        layout = token_layout(mesh, len(context), len(values))
        step = _Step(module.config, mesh, layout, len(values))
        head = to_jax(module.norm_out.linear(module.norm_out.silu(to_torch(embedding))))
        tokens = step.run(
            _Inputs(
                values=pad_rows(values, layout.padded),
                tables=_rope_tables(module.config, latents.shape[2:], layout.padded),
                context=context,
                context_tokens=count,
                embedding=jax.nn.silu(embedding)[0],
                head=head.reshape(2, -1).astype(jnp.float32),
                blocks=to_jax(dict(module.transformer_blocks.template.named_parameters())),
                outer=_outer(module),
            )
        )
        return tokens[:, : len(values)]

    return call(module, params, method, latents)


class _Inputs(NamedTuple):
    """The inputs of one step's blocks; `_Step.run` has their shardings.

    Attributes:
        values: [L, channels of the input].
        tables: Cosines and sines, two arrays [L, D].
        context: [B, K, C].
        context_tokens: int32 [B], the number of real tokens of `context`.
        embedding: [C], of the time, after its activation.
        head: Scale and shift before the output, [2, C].
        blocks: The stacked weights of the layers.
        outer: The weights outside the layers.
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

    def run(self, inputs: _Inputs) -> jax.Array:
        """Return [B, L, C of the latents], float32, padding included."""
        self._blocks = {
            name: weight_spec(self._mesh, RULES, f"transformer_blocks.*.{name}", value.shape[1:], stacked=True)
            for name, value in inputs.blocks.items()
        }
        tokens, branch = P(self._layout.token_axes), P(self._layout.branch_axis)
        specs = _Inputs(tokens, (tokens, tokens), branch, branch, P(), P(), self._blocks, P())  # type: ignore[arg-type]
        local = jax.shard_map(
            self._local, mesh=self._mesh, in_specs=(specs,), out_specs=self._layout.spec, check_vma=False
        )
        return local(inputs)

    def _local(self, inputs: _Inputs) -> jax.Array:
        ops, outer = self._ops, inputs.outer
        video = ops.linear(inputs.values, outer["x_embedder.weight"], outer["x_embedder.bias"])
        modulations = [self._modulations(f"{name}.linear", inputs) for name in _STREAMS]

        def layer(hidden: Any, weights: Params, index: jax.Array) -> Any:
            tables = [jax.lax.dynamic_index_in_dim(table, index, keepdims=False) for table in modulations]

            def run_branch(streams: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                return self._block(*streams, weights, tables, inputs.tables)

            return jax.lax.map(run_branch, (*hidden, inputs.context_tokens))

        branches = len(inputs.context)
        hidden, _ = scan_layers(
            layer,
            (jnp.broadcast_to(video, (branches, *video.shape)), inputs.context),
            {name: value for name, value in inputs.blocks.items() if ".linear." not in name},
            self._blocks,
            depth=len(inputs.blocks["norm1.linear.bias"]),
            ahead=_AHEAD,
            platform=self._platform,
        )
        scale, shift = inputs.head

        def head(hidden: jax.Array) -> jax.Array:
            normed = ops.layer_norm(hidden, 1 + scale[None], shift[None], eps=_EPS)
            return ops.linear(normed, outer["proj_out.weight"], outer["proj_out.bias"]).astype(jnp.float32)

        return jax.lax.map(head, hidden)

    def _modulations(self, name: str, inputs: _Inputs) -> jax.Array:
        """Return every layer's shift, scale and gate of attention and feed-forward, float32 [layers, 6, C].

        They are computed at once, before the layers, by a product with split matrices whose results are gathered, not
        the matrices.
        """
        weight, bias = inputs.blocks[f"{name}.weight"], inputs.blocks[f"{name}.bias"]
        product = jnp.einsum(
            "loe,e->lo", weight, inputs.embedding.astype(weight.dtype), preferred_element_type=jnp.float32
        )
        if self._blocks[f"{name}.weight"] == SPLIT:
            product = jax.lax.all_gather(product, SHARDS, axis=1, tiled=True)
        return (product + bias.astype(jnp.float32)).reshape(len(product), 6, -1)

    def _block(
        self,
        x: jax.Array,
        context: jax.Array,
        count: jax.Array,
        w: Params,
        modulations: list[jax.Array],
        tables: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Run one layer of one branch, as in diffusers' HunyuanVideo15TransformerBlock.

        Args:
            x: [t, C], of the video.
            context: [K, C].
            count: Number of real tokens of `context`.
            w: The layer's weights.
            modulations: [6, C] of video and context.
            tables: As in `_Inputs`.
        """
        ops = self._ops
        of_video, of_context = ([row[None] for row in table] for table in modulations)

        def project(name: str, x: Any, **options: Any) -> jax.Array:
            return linear(ops, w, name, x, **options)

        def normalise(x: jax.Array, table: list[jax.Array], target: str) -> Any:
            """Normalise the inputs of the linear layer `target`, with the shift and scale that a table begins with."""
            return ops.layer_norm(x, 1 + table[1], table[0], eps=_EPS, rounded=rounded_type(w, target))

        def rotate(name: str, norm: str, rows: Any, scale: float, **options: Any) -> Any:
            weight = w[f"attn.{norm}.weight"].astype(jnp.float32) * scale
            return ops.head_norm_rope(project(f"attn.{name}", rows), weight, None, eps=_EPS, **options)

        def add_sum(name: str, x: jax.Array, residual: jax.Array, gate: jax.Array) -> jax.Array:
            """Add to the residual a projection of this device's heads or hidden units, summed over all devices."""
            product = jnp.einsum("ki,oi->ko", x, w[f"{name}.weight"], preferred_element_type=jnp.float32)
            if self._blocks[f"{name}.weight"][2] == "tp":
                product = jax.lax.psum(product, "tp")
            product = product + w[f"{name}.bias"].astype(jnp.float32)
            return (residual.astype(jnp.float32) + gate * product).astype(x.dtype)

        normed = normalise(context, of_context, "attn.add_q_proj")
        attended, other, gathered = exchanged_attention(
            normalise(x, of_video, "attn.to_q"),
            Projections(
                query=lambda rows: rotate(
                    "to_q", "norm_q", rows, self._query_scale, tables=tables, groups=self._groups
                ),
                key=lambda rows: rotate(
                    "to_k", "norm_k", rows, 1, tables=tables, groups=self._groups, parts=self._key_parts
                ),
                value=lambda rows: project("attn.to_v", rows, groups=self._groups),
            ),
            heads=self._heads,
            kv_len=self._tokens + count,
            token_axes=self._layout.token_axes,
            platform=self._platform,
            beside=[{name: w[name]} for name in _BESIDE],
            replicated=ReplicatedTokens(
                rotate("add_q_proj", "norm_added_q", normed, self._query_scale, tables=None),
                rotate("add_k_proj", "norm_added_k", normed, 1, tables=None),
                project("attn.add_v_proj", normed),
                after=self._tokens,
            ),
        )
        w = w | gathered
        assert other is not None
        x = project("attn.to_out.0", attended, residual=x, gate=of_video[2])
        inner = project("ff.net.0.proj", normalise(x, of_video[3:], "ff.net.0.proj"), activation="gelu_tanh")
        x = project("ff.net.2", inner, residual=x, gate=of_video[5])
        context = add_sum("attn.to_add_out", other, context, of_context[2])
        normed = normalise(context, of_context[3:], "ff_context.net.0.proj")
        inner = project("ff_context.net.0.proj", normed, activation="gelu_tanh")
        context = add_sum("ff_context.net.2", inner, context, of_context[5])
        return x, context


def _rope_tables(config: Any, grid: tuple[int, ...], length: int) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of the video's angles, each [length, D], for pairs (i, i + D/2)."""
    axes = []
    for places, width in zip(grid, config.rope_axes_dim, strict=True):
        # The host computes them, because a TPU's powers are off by a few roundings.
        exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        speeds = np.float32(1) / np.float32(config.rope_theta) ** exponents
        axes.append(jnp.asarray(np.arange(places, dtype=np.float32)[:, None] * speeds))
    angles = combine_axes(axes)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    tables = jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
    return pad_rows(tables[0], length), pad_rows(tables[1], length)


def _outer(module: Any) -> Params:
    """Return the weights outside the blocks, with the patch embedding as a matrix [C, channels of the input]."""
    weight = to_jax(module.x_embedder.proj.weight)
    return {
        "x_embedder.weight": weight.reshape(weight.shape[0], -1),
        "x_embedder.bias": to_jax(module.x_embedder.proj.bias),
        "proj_out.weight": to_jax(module.proj_out.weight),
        "proj_out.bias": to_jax(module.proj_out.bias),
    }
