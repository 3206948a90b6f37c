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
from wan_tpu.families.shared.layers import linear, project_in_all_layers, rounded_type, scan_layers
from wan_tpu.families.shared.tokens import combine_axes, pad_rows, patchify
from wan_tpu.ops.attention import query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, ReplicatedTokens, exchanged_attention, head_groups, key_parts
from wan_tpu.runtime.bridge import Params, call, collect_linear, to_jax, to_torch
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, run_on_devices, split_layers, token_layout

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
_PREFETCHED = tuple(f"attn.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_GATHERED = ("ff.net.0.proj.weight", "ff.net.2.weight")  # Weights gathered while attention is computed.
_EPS = 1e-6  # Epsilon of every norm: a constant of diffusers' block.
_STREAMS = ("norm1", "norm1_context")


def predict(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    latents: jax.Array,
    timestep: jax.Array,
    timestep_r: jax.Array,
    encodings: Encodings,
) -> jax.Array:
    """Return the transformer's prediction for each branch as tokens, float32 [B, L, C of the latents].

    Args:
        latents: [1, 2C + 1, T, H, W], in the dtype to compute in: latents, the image's, and the mask.
        timestep: float32 [1].
        timestep_r: float32 [1], the next step's timestep, 0 after the last; only meanflow models use it.
    """

    def method(module: Any, latents: torch.Tensor) -> jax.Array:
        values = patchify(to_jax(latents), (1, 1, 1))
        encoder_hidden_states, encoder_tokens = make_context(module, encodings, timestep)
        temb = embed_time(module, timestep, timestep_r, latents.dtype)
        layout = token_layout(mesh, len(encoder_hidden_states), len(values))
        step = _Step(module, mesh, layout, len(values))
        head = to_jax(module.norm_out.linear(module.norm_out.silu(to_torch(temb))))
        tokens = step.run(
            _Inputs(
                values=pad_rows(values, layout.padded),
                rotary_emb=_rope_tables(module.config, latents.shape[2:], layout.padded),
                encoder_hidden_states=encoder_hidden_states,
                encoder_tokens=encoder_tokens,
                temb=jax.nn.silu(temb)[0],
                head=head.reshape(2, -1).astype(jnp.float32),
                blocks=to_jax(dict(module.transformer_blocks.template.named_parameters())),
                other_weights=collect_linear(x_embedder=module.x_embedder.proj, proj_out=module.proj_out),
            )
        )
        return tokens[:, : len(values)]

    return call(module, params, method, latents)


class _Inputs(NamedTuple):
    """The inputs of one step's blocks; `_Step.run` has their shardings."""

    values: jax.Array  # [L, channels of the input].
    rotary_emb: tuple[jax.Array, jax.Array]  # Cosines and sines, two arrays [L, D].
    encoder_hidden_states: jax.Array  # [B, K, C], the context.
    encoder_tokens: jax.Array  # Int32 [B], the number of its real tokens.
    temb: jax.Array  # [C], of the time, after its activation.
    head: jax.Array  # Scale and shift before the output, [2, C].
    blocks: Params
    other_weights: Params


class _Step:
    """One step's blocks inside a `jax.shard_map`."""

    def __init__(self, module: Any, mesh: Mesh, layout: TokenLayout, tokens: int) -> None:
        config, self._logits, self._values = module.config, module.logits_dtype, module.values_dtype
        self._mesh, self._layout, self._tokens = mesh, layout, tokens
        self._heads = config.num_attention_heads
        self._platform = mesh.devices.flat[0].platform
        self._groups = head_groups(mesh, self._heads)
        self._key_parts = key_parts(mesh, self._heads, config.attention_head_dim)
        self._query_scale = query_scale(config.attention_head_dim)
        self._ops: Ops = ops_for(self._platform)

    def run(self, inputs: _Inputs) -> jax.Array:
        """Return [B, L, C of the latents], float32, padding included."""
        self._blocks = split_layers(self._mesh, RULES, "transformer_blocks", inputs.blocks)
        tokens, branch = P(self._layout.token_axes), P(self._layout.branch_axis)
        return run_on_devices(
            self._local,
            self._mesh,
            inputs,
            self._layout.spec,
            values=tokens,
            rotary_emb=tokens,
            encoder_hidden_states=branch,
            encoder_tokens=branch,
            blocks=self._blocks,
        )

    def _local(self, inputs: _Inputs) -> jax.Array:
        ops, other_weights = self._ops, inputs.other_weights
        video = linear(ops, other_weights, "x_embedder", inputs.values)
        modulations = [self._modulations(f"{name}.linear", inputs) for name in _STREAMS]

        def layer(hidden_states: Any, weights: Params, index: jax.Array) -> Any:
            modulation = [jax.lax.dynamic_index_in_dim(table, index, keepdims=False) for table in modulations]

            def run_branch(streams: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                return self._block(*streams, weights, modulation, inputs.rotary_emb)

            return jax.lax.map(run_branch, (*hidden_states, inputs.encoder_tokens))

        branches = len(inputs.encoder_hidden_states)
        hidden_states, _ = scan_layers(
            layer,
            (jnp.broadcast_to(video, (branches, *video.shape)), inputs.encoder_hidden_states),
            {name: value for name, value in inputs.blocks.items() if ".linear." not in name},
            self._blocks,
            depth=len(inputs.blocks["norm1.linear.bias"]),
            prefetched=_PREFETCHED,
            platform=self._platform,
        )
        scale, shift = inputs.head

        def head(hidden_states: jax.Array) -> jax.Array:
            normed = ops.layer_norm(hidden_states, 1 + scale[None], shift[None], eps=_EPS)
            return linear(ops, other_weights, "proj_out", normed).astype(jnp.float32)

        return jax.lax.map(head, hidden_states)

    def _modulations(self, name: str, inputs: _Inputs) -> jax.Array:
        """Return every layer's shift, scale and gate of attention and feed-forward, float32 [layers, 6, C]."""
        modulations = project_in_all_layers(inputs.blocks, self._blocks, name, inputs.temb)
        return modulations.reshape(len(modulations), 6, -1)

    def _block(
        self,
        hidden_states: jax.Array,
        encoder_hidden_states: jax.Array,
        encoder_tokens: jax.Array,
        weights: Params,
        modulations: list[jax.Array],
        rotary_emb: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Run one layer of one branch, as in diffusers' HunyuanVideo15TransformerBlock.

        Args:
            hidden_states: [t, C], of the video.
            encoder_hidden_states: [K, C], the context.
            encoder_tokens: Number of its real tokens.
            modulations: [6, C] of video and context.
            rotary_emb: As in `_Inputs`.
        """
        ops = self._ops
        of_video, of_context = ([row[None] for row in table] for table in modulations)

        def project(name: str, rows: Any, **options: Any) -> jax.Array:
            return linear(ops, weights, name, rows, **options)

        def normalise(rows: jax.Array, modulation: list[jax.Array], target: str) -> Any:
            """Normalise the inputs of the linear layer `target`, with the shift and scale that a table begins with."""
            return ops.layer_norm(
                rows, 1 + modulation[1], modulation[0], eps=_EPS, rounded=rounded_type(weights, target)
            )

        def rotate(name: str, norm: str, rows: Any, scale: float, **options: Any) -> Any:
            weight = weights[f"attn.{norm}.weight"].astype(jnp.float32) * scale
            return ops.head_norm_rope(project(f"attn.{name}", rows), weight, None, eps=_EPS, **options)

        def add_sum(name: str, rows: jax.Array, residual: jax.Array, gate: jax.Array) -> jax.Array:
            """Add to the residual a projection of this device's heads or hidden units, summed over all devices."""
            product = jnp.einsum("ki,oi->ko", rows, weights[f"{name}.weight"], preferred_element_type=jnp.float32)
            if self._blocks[f"{name}.weight"][2] == "tp":
                product = jax.lax.psum(product, "tp")
            product = product + weights[f"{name}.bias"].astype(jnp.float32)
            return (residual.astype(jnp.float32) + gate * product).astype(rows.dtype)

        normed = normalise(encoder_hidden_states, of_context, "attn.add_q_proj")
        attended, other, gathered, _ = exchanged_attention(
            normalise(hidden_states, of_video, "attn.to_q"),
            Projections(
                query=lambda rows: rotate(
                    "to_q", "norm_q", rows, self._query_scale, tables=rotary_emb, groups=self._groups
                ),
                key=lambda rows: rotate(
                    "to_k", "norm_k", rows, 1, tables=rotary_emb, groups=self._groups, parts=self._key_parts
                ),
                value=lambda rows: project("attn.to_v", rows, groups=self._groups),
            ),
            heads=self._heads,
            kv_len=self._tokens + encoder_tokens,
            token_axes=self._layout.token_axes,
            platform=self._platform,
            to_gather=[{name: weights[name]} for name in _GATHERED],
            qk=self._logits,
            pv=self._values,
            replicated=ReplicatedTokens(
                rotate("add_q_proj", "norm_added_q", normed, self._query_scale, tables=None),
                rotate("add_k_proj", "norm_added_k", normed, 1, tables=None),
                project("attn.add_v_proj", normed),
                after=self._tokens,
            ),
        )
        weights = weights | gathered
        assert other is not None
        hidden_states = project("attn.to_out.0", attended, residual=hidden_states, gate=of_video[2])
        inner = project(
            "ff.net.0.proj", normalise(hidden_states, of_video[3:], "ff.net.0.proj"), activation="gelu_tanh"
        )
        hidden_states = project("ff.net.2", inner, residual=hidden_states, gate=of_video[5])
        encoder_hidden_states = add_sum("attn.to_add_out", other, encoder_hidden_states, of_context[2])
        normed = normalise(encoder_hidden_states, of_context[3:], "ff_context.net.0.proj")
        inner = project("ff_context.net.0.proj", normed, activation="gelu_tanh")
        encoder_hidden_states = add_sum("ff_context.net.2", inner, encoder_hidden_states, of_context[5])
        return hidden_states, encoder_hidden_states


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
