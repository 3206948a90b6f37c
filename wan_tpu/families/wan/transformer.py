"""A Wan expert as a program for slices: diffusers' parameters and arithmetic, tokens and weights split over the mesh.

The parts of diffusers' WanTransformer3DModel that are slow on TPU are replaced here, with its parameter names kept:
queries and keys pair channels (i, i + D/2) for RoPE, and their weights are permuted once when they are loaded; norms,
gates, activations and residuals are fused into the operations that read or write them; the patch embedding is a matmul;
keys and values of the text are computed once per request (`text_keys`). Time, text and image embeddings are the
module's own.

Each device holds some tokens of all heads; each layer's weights are gathered while earlier ones are in use, and
self-attention exchanges tokens for heads (`wan_tpu.ops.attention`). All of it is one `jax.shard_map`.

Shapes: B branches of guidance, T H W latent frames, height, width, L tokens, t tokens of one device, N heads, D head
width, C = N*D channels, M modulations (1, or 2 if the first frame's tokens have their own timestep).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.families.shared.layers import in_float32, linear, map_branches, rounded_type, scan_layers
from wan_tpu.families.shared.tokens import pad_rows, patchify
from wan_tpu.families.wan.text_keys import TextKeys, key_sharding
from wan_tpu.families.wan.tokens import rope_tables
from wan_tpu.ops.attention import attention, query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.ops.sparse_linear import QUERY_BLOCK, SparseLinear
from wan_tpu.runtime.bridge import Params, call, collect_linear, to_jax
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, run_on_devices, split_layers, token_layout

# Large matrices [O, I] have their outputs split over the devices of one branch, and are gathered layer by layer.
# Everything else, with embeddings and output (0.6 % of a 14B model), is whole on every device.
MATRICES = r"blocks\..*\.(attn[12]\.(to_q|to_k|to_v|to_out\.0|add_k_proj|add_v_proj)|ffn\.net\.(0\.proj|2))\.weight"
RULES = (Rule(MATRICES, (SHARDS, None)), Rule(rf"(?!{MATRICES}$).*", ()))
LINEAR = "attn1.proj_l"  # A block's trained matrix for sparse-linear attention, under its authors' name.


class Reuse(NamedTuple):
    """The residual of an earlier step, and the branches that reuse it."""

    residual: jax.Array  # [B, L, C], L padded, what the blocks added in that step; see `residual_shape`.
    skipped: jax.Array | None  # Which branches reuse it, bool [B]; None if all do, and no block is computed.


def residual_shape(mesh: Mesh, config: Any, branches: int, tokens: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """Return shape and sharding of `Reuse.residual`."""
    block = 1 if config.get("attention") is None else QUERY_BLOCK
    layout = token_layout(mesh, branches, tokens, config["num_attention_heads"], block)
    shape = (branches, layout.padded, config["num_attention_heads"] * config["attention_head_dim"])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout.spec))


def velocity(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    latents: jax.Array,
    timestep: jax.Array,
    first_tokens: int,
    text_keys: TextKeys,
    reuse: Reuse | None = None,
    *,
    attention_density: float | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return each branch's velocity as tokens, float32 [B, L, patch values], and with `reuse` the residual to keep.

    Args:
        latents: [1, C, T, H, W], in the dtype to compute in, the same for every branch.
        timestep: [M] timesteps; if there are two, the first one is for the first `first_tokens` tokens.
        first_tokens: Number of tokens with the first of two timesteps.
        text_keys: From `text_keys`; their B is the number of branches.
        reuse: The residual that may be reused.
        attention_density: The share of the blocks of keys that sparse-linear attention keeps; None for attention to
            all keys.
    """

    def method(
        module: Any, latents: torch.Tensor, timestep: torch.Tensor, text_keys: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        temb, timestep_proj = embed_time(module, timestep, latents.dtype)
        patch = module.config.patch_size
        tokens = patchify(to_jax(latents), patch)
        block = 1 if attention_density is None else QUERY_BLOCK
        layout = token_layout(mesh, text_keys["key"].shape[1], len(tokens), module.config.num_attention_heads, block)
        rotary_emb = rope_tables(module, [n // p for n, p in zip(latents.shape[2:], patch, strict=True)])
        return WanStep(module, mesh, layout, first_tokens, len(tokens), attention_density).run(
            WanInputs(
                tokens=pad_rows(tokens, layout.padded),
                rotary_emb=tuple(pad_rows(table, layout.padded) for table in rotary_emb),
                timestep_proj=to_jax(timestep_proj).astype(jnp.float32),
                head=head_modulation(module, temb).astype(jnp.float32),
                text_keys=to_jax(text_keys),
                blocks=to_jax(dict(module.blocks.template.named_parameters())),
                other_weights=collect_linear(patch_embedding=module.patch_embedding, proj_out=module.proj_out),
                reuse=reuse,
            )
        )

    return call(module, params, method, latents, timestep, text_keys)


class WanInputs(NamedTuple):
    """The inputs of one step's blocks; `WanStep.run` has their shardings."""

    tokens: jax.Array  # [L, patch values].
    rotary_emb: tuple[jax.Array, ...]  # Cosines and sines, two arrays [L, D].
    timestep_proj: jax.Array  # [M, 6, C], for every layer.
    head: jax.Array  # Shift and scale before the output, [2, M, C].
    text_keys: TextKeys  # From `text_keys.text_keys`.
    blocks: Params
    other_weights: Params
    reuse: Reuse | None = None  # The residual that may be reused.


class WanStep:
    """One step's blocks inside a `jax.shard_map`; a transformer that differs overrides the methods that differ."""

    def __init__(
        self, module: Any, mesh: Mesh, layout: TokenLayout, first_tokens: int, tokens: int, density: float | None = None
    ) -> None:
        """Prepare a step over `tokens` tokens; `density` is the attention density, None for attention to all keys."""
        platform, config = mesh.devices.flat[0].platform, module.config
        self._logits, self._values = module.logits_dtype, module.values_dtype
        self._mesh, self._layout, self._tokens, self._first = mesh, layout, tokens, first_tokens
        self._heads, self._eps, self._platform = config.num_attention_heads, config.eps, platform
        self._groups = head_groups(mesh, self._heads, layout.head_axes)
        self._density = density
        self._key_parts = key_parts(mesh, self._heads, config.attention_head_dim, layout.head_axes)
        self._query_scale = query_scale(config.attention_head_dim)
        self._ops: Ops = ops_for(platform)

    def run(self, inputs: WanInputs) -> tuple[jax.Array, jax.Array | None]:
        """Return [B, L, patch values], float32, without padding, and the residual, or None without `reuse`."""
        branches = inputs.text_keys["key"].shape[1]
        blocks = {name: x for name, x in inputs.blocks.items() if not name.startswith(_USED_BY_TEXT_KEYS)}
        self._blocks = split_layers(self._mesh, RULES, "blocks", blocks)
        self._local_branches = branches // (self._mesh.shape["dp"] if self._layout.branch_axis else 1)
        tokens, spec = P(self._layout.token_axes), self._layout.spec
        velocities, residual = run_on_devices(
            self._local,
            self._mesh,
            inputs._replace(blocks=blocks),
            (spec, None if inputs.reuse is None or inputs.reuse.skipped is None else spec),
            tokens=tokens,
            rotary_emb=tokens,
            text_keys={name: key_sharding(self._mesh, name, branches).spec for name in inputs.text_keys},
            blocks=self._blocks,
            reuse=None if inputs.reuse is None else Reuse(spec, P(self._layout.branch_axis)),  # type: ignore[arg-type]
        )
        return velocities[:, : self._tokens], residual

    def _local(self, inputs: WanInputs) -> tuple[jax.Array, jax.Array | None]:
        ops, other_weights, reuse = self._ops, inputs.other_weights, inputs.reuse
        first_rows = self._first - jax.lax.axis_index(self._layout.token_axes) * len(inputs.tokens)

        def layer(hidden_states: jax.Array, weights: Params, index: jax.Array) -> jax.Array:
            modulation = weights["scale_shift_table"] + inputs.timestep_proj  # [M, 6, C]
            return map_branches(
                lambda branch: self._block(branch[0], branch[1], weights, modulation, inputs.rotary_emb, first_rows),
                (hidden_states, self._layer_keys(inputs.text_keys, index)),
            )

        embedded = self.embed(inputs)
        start = jnp.broadcast_to(embedded, (self._local_branches, *embedded.shape))
        depth = len(inputs.text_keys["key"])
        residual = None
        if reuse is not None and reuse.skipped is None:
            hidden_states = start + reuse.residual
        else:
            hidden_states = scan_layers(
                layer, start, inputs.blocks, self._blocks, depth=depth, prefetched=_PREFETCHED, platform=self._platform
            )
        if reuse is not None and reuse.skipped is not None:
            skipped = reuse.skipped[:, None, None]
            residual = jnp.where(skipped, reuse.residual, hidden_states - start)
            hidden_states = jnp.where(skipped, start + reuse.residual, hidden_states)
        shift, scale = inputs.head

        def head(hidden_states: jax.Array) -> jax.Array:
            normed = ops.layer_norm(hidden_states, 1 + scale, shift, eps=self._eps, first_rows=first_rows)
            return linear(ops, other_weights, "proj_out", normed).astype(jnp.float32)

        return map_branches(head, hidden_states), residual

    def embed(self, inputs: WanInputs) -> jax.Array:
        """Return the hidden state before the first layer, [t, C]."""
        return linear(self._ops, inputs.other_weights, "patch_embedding", inputs.tokens)

    def scale_keys(self, keys: tuple[jax.Array, ...], weights: Params, first_rows: jax.Array) -> tuple[jax.Array, ...]:
        """Return the keys of self-attention as they are attended to, in parts as in `Projections.key`."""
        return keys

    def text_gate(self, channels: int, first_rows: jax.Array) -> dict[str, Any]:
        """Return options of `linear` that apply cross-attention's result to some rows only; none by default."""
        return {}

    def _layer_keys(self, text_keys: TextKeys, layer: jax.Array) -> TextKeys:
        """Return keys and values of one layer, each [B of this device, L, C]."""
        of_layer = {name: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for name, x in text_keys.items()}
        return {name: jnp.broadcast_to(x, (self._local_branches, *x.shape[1:])) for name, x in of_layer.items()}

    def _block(
        self,
        hidden_states: jax.Array,
        text_keys: TextKeys,
        weights: Params,
        modulation: jax.Array,
        rotary_emb: tuple[jax.Array, ...],
        first_rows: jax.Array,
    ) -> jax.Array:
        """Run one layer on this device's tokens of one branch, as in diffusers' WanTransformerBlock.

        Args:
            hidden_states: [t, C].
            text_keys: The layer's keys and values of text and image.
            modulation: [M, 6, C], the layer's modulation.
            rotary_emb: As in `WanInputs`.
            first_rows: Number of rows with the first of two modulations.
        """
        ops, eps = self._ops, self._eps
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (modulation[:, i] for i in range(6))

        def project(name: str, rows: Any, **options: Any) -> jax.Array:
            return linear(ops, weights, name, rows, **options)

        def normalise(rows: jax.Array, scale: jax.Array, shift: jax.Array, name: str, **options: Any) -> Any:
            """Normalise the inputs of the linear layer `name`."""
            return ops.layer_norm(rows, scale, shift, eps=eps, rounded=rounded_type(weights, name), **options)

        def rotate(name: str, rows: Any, factor: float, **options: Any) -> Any:
            weight = weights[f"attn1.norm_{name}.weight"].astype(jnp.float32) * factor
            options = {"eps": eps, "groups": self._groups} | options
            return ops.rms_norm_rope(project(f"attn1.to_{name}", rows), weight, rotary_emb, **options)

        attended, _, gathered, _ = exchanged_attention(
            normalise(hidden_states, 1 + scale, shift, "attn1.to_q", first_rows=first_rows),
            Projections(
                query=lambda rows: rotate("q", rows, self._query_scale),
                key=lambda rows: self.scale_keys(rotate("k", rows, 1, parts=self._key_parts), weights, first_rows),
                value=lambda rows: project("attn1.to_v", rows, groups=self._groups),
            ),
            heads=self._heads,
            kv_len=self._tokens,
            token_axes=self._layout.token_axes,
            head_axes=self._layout.head_axes,
            platform=self._platform,
            to_gather=[{name: weights[name]} for name in _GATHERED],
            qk=self._logits,
            pv=self._values,
            sparse=None
            if self._density is None
            else SparseLinear(self._density, weights[f"{LINEAR}.weight"], weights[f"{LINEAR}.bias"]),
        )
        weights = weights | gathered
        hidden_states = project("attn1.to_out.0", attended, residual=hidden_states, gate=gate, first_rows=first_rows)

        hidden_states = self.attend_to_text(hidden_states, text_keys, weights, first_rows)
        normed = normalise(hidden_states, 1 + ffn_scale, ffn_shift, "ffn.net.0.proj", first_rows=first_rows)
        inner = project("ffn.net.0.proj", normed, activation="gelu_tanh")
        return project("ffn.net.2", inner, residual=hidden_states, gate=ffn_gate, first_rows=first_rows)

    def attend_to_text(
        self,
        hidden_states: jax.Array,
        text_keys: TextKeys,
        weights: Params,
        first_rows: jax.Array,
        *,
        rows: int | None = None,
    ) -> jax.Array:
        """Return the hidden state after a layer's cross-attention to text and image.

        Args:
            hidden_states, text_keys, weights, first_rows: As for `_block`.
            rows: How many of the first rows attend; all if None.
        """
        ops, eps = self._ops, self._eps
        normed = hidden_states[:rows]
        if "norm2.weight" in weights:
            rounded = rounded_type(weights, "attn2.to_q")
            scale, shift = weights["norm2.weight"][None], weights["norm2.bias"][None]
            normed = ops.layer_norm(hidden_states, scale, shift, eps=eps, rows=rows, rounded=rounded)
        weight = weights["attn2.norm_q.weight"].astype(jnp.float32) * self._query_scale
        q = ops.rms_norm_rope(linear(ops, weights, "attn2.to_q", normed), weight, None, eps=eps)
        attended = attention(q, text_keys["key"], text_keys["value"], heads=self._heads, platform=self._platform)
        if "image_key" in text_keys:
            image = text_keys["image_key"], text_keys["image_value"]
            attended = attended + attention(q, *image, heads=self._heads, platform=self._platform)
        return linear(
            ops,
            weights,
            "attn2.to_out.0",
            attended,
            residual=hidden_states,
            **self.text_gate(hidden_states.shape[1], first_rows),
        )


# Weights used before or right after self-attention, which takes most of a layer's time: they are gathered during the
# previous layer's self-attention.
_PREFETCHED = tuple(f"attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_GATHERED = ("ffn.net.0.proj.weight", "ffn.net.2.weight")  # Weights gathered while self-attention is computed.
# Weights that only `text_keys` uses, once per request.
_USED_BY_TEXT_KEYS = ("attn2.to_k", "attn2.to_v", "attn2.norm_k", "attn2.add_", "attn2.norm_added_k")


def embed_time(module: Any, timestep: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embedding [M, C] of timesteps [M], and its projection for the blocks' modulation [M, 6, C]."""
    embedder = module.condition_embedder
    wave = embedder.timesteps_proj(timestep).to(next(iter(embedder.time_embedder.parameters())).dtype)
    with in_float32():
        temb = embedder.time_embedder(wave).to(dtype)
    return temb, embedder.time_proj(embedder.act_fn(temb)).unflatten(1, (6, -1))


def head_modulation(module: Any, temb: torch.Tensor) -> jax.Array:
    """Return shift and scale before the output, [2, M, C]."""
    return to_jax(module.scale_shift_table + temb[:, None]).swapaxes(0, 1)
