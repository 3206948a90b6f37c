"""A Wan expert as a program for slices: diffusers' parameters and arithmetic, tokens and weights split over the mesh.

What diffusers' WanTransformer3DModel does badly on TPU is done differently here, with its parameter names kept:
queries and keys pair channels (i, i + D/2) for RoPE, their weights being permuted once at load; norms, gates,
activations and residuals are fused into what reads or writes them; the patch embedding is a matmul; keys and values of
the text are made once a request. Time, text and image embeddings are the module's own.

Each device holds some tokens of all heads; each layer's weights are gathered while earlier ones are in use, and
self-attention exchanges tokens for heads (`wan_tpu.ops.attention`). All of it is one `jax.shard_map`.

Shapes: B branches of guidance, T H W latent frames, height, width, L tokens, t tokens of
one device, N heads, D head width, C = N*D channels, M modulations (1, or 2 when the first frame's tokens have a
timestep of their own).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.families.shared.layers import each, linear, rounded_to, scan_layers
from wan_tpu.families.shared.tokens import padded, patches
from wan_tpu.families.wan.tokens import rope_tables
from wan_tpu.ops.attention import attention, query_scale
from wan_tpu.ops.dispatch import Ops, ops_for
from wan_tpu.ops.exchange import Projections, exchanged_attention, head_groups, key_parts
from wan_tpu.ops.sparse_linear import QUERY_BLOCK, SparseLinear
from wan_tpu.runtime.bridge import Params, call, to_jax
from wan_tpu.runtime.components import LOGITS
from wan_tpu.runtime.mesh import SHARDS, Rule, TokenLayout, token_layout, weight_spec

# [O, I]: the outputs split over the devices of one branch, gathered layer by layer. All that is not a large matrix, and
# embeddings and output (0.6 % of a 14B model), is whole on every device.
MATRICES = r"blocks\..*\.(attn[12]\.(to_q|to_k|to_v|to_out\.0|add_k_proj|add_v_proj)|ffn\.net\.(0\.proj|2))\.weight"
RULES = (Rule(MATRICES, (SHARDS, None)), Rule(rf"(?!{MATRICES}$).*", ()))
LINEAR = "attn1.proj_l"  # of a block: the trained matrix of sparse-linear attention, by its authors' name
TextKeys = dict[str, jax.Array]  # "key", "value" [depth, B, 512, C], and "image_key", "image_value" with 257 tokens


# ---- once a request


def text_keys(
    module: torch.nn.Module, params: Params, mesh: Mesh, text: jax.Array, image: jax.Array | None
) -> TextKeys:
    """Return every layer's cross-attention keys and values.

    text  [B, 512, I] embeddings of the prompts; image [1, 257, I] CLIP features, the same for every branch
    """

    def method(module: Any, text: torch.Tensor, image: torch.Tensor | None) -> TextKeys:
        embedder, ops, eps = module.condition_embedder, ops_for("cpu"), module.config.eps
        text = to_jax(embedder.text_embedder(text))
        image = None if image is None else to_jax(embedder.image_embedder(image))

        def keys(context: jax.Array, weights: Params, key: str, value: str, norm: str) -> list[jax.Array]:
            flat = context.reshape(-1, context.shape[-1])
            made = linear(ops, weights, key, flat)
            made = ops.rms_norm_rope(made, weights[f"{norm}.weight"], None, eps=eps)
            values = linear(ops, weights, value, flat)
            return [x.reshape(*context.shape[:2], -1) for x in (made, values)]

        def layer(_: None, weights: Params) -> tuple[None, TextKeys]:
            made = dict(zip(("key", "value"), keys(text, weights, "to_k", "to_v", "norm_k"), strict=True))
            if image is not None:
                both = keys(image, weights, "add_k_proj", "add_v_proj", "norm_added_k")
                made |= dict(zip(("image_key", "image_value"), both, strict=True))
            return None, made

        return jax.lax.scan(layer, None, to_jax(dict(module.blocks.template.attn2.named_parameters())))[1]

    found = call(module, params, method, text, image)
    return {
        name: jax.lax.with_sharding_constraint(value, key_sharding(mesh, name, text.shape[0]))
        for name, value in found.items()
    }


def key_sharding(mesh: Mesh, name: str, branches: int) -> NamedSharding:
    """Return where keys or values [depth, B, L, C] lie: whole wherever their branch is computed."""
    axis = None if name.startswith("image") else token_layout(mesh, branches, 1).branch_axis
    return NamedSharding(mesh, P(None, axis))


# ---- once a step


class Reuse(NamedTuple):
    """What a step may use of an earlier one, and which branches do.

    residual  [B, L, C], L padded: what the blocks added there; see `residual_shape`
    skipped   bool [B]; None: all of them, and no block is computed
    """

    residual: jax.Array
    skipped: jax.Array | None


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
    times: jax.Array,
    first_tokens: int,
    keys: TextKeys,
    reuse: Reuse | None = None,
    *,
    kept_blocks: float | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the velocity of each branch as tokens, float32 [B, L, patch values]; with `reuse` the residual to keep.

    latents       [1, C, T, H, W] in the dtype to compute in, the same for every branch
    times         [M] timesteps; of two, the first is that of the first `first_tokens` tokens
    keys          from `text_keys`; their B is the number of branches
    kept_blocks   share of the blocks of keys that sparse-linear attention keeps; None: attention to all
    """

    def method(
        module: Any, latents: torch.Tensor, times: torch.Tensor, keys: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        embedding, modulation = _embed_time(module, times, latents.dtype)
        patch = module.config.patch_size
        cut = patches(to_jax(latents), patch)
        block = 1 if kept_blocks is None else QUERY_BLOCK
        layout = token_layout(mesh, keys["key"].shape[1], len(cut), module.config.num_attention_heads, block)
        tables = rope_tables(module, [n // p for n, p in zip(latents.shape[2:], patch, strict=True)])
        return _Step(module, mesh, layout, first_tokens, len(cut), kept_blocks).run(
            Inputs(
                tokens=padded(cut, layout.padded),
                tables=tuple(padded(table, layout.padded) for table in tables),
                modulation=to_jax(modulation).astype(jnp.float32),
                head=_head_modulation(module, embedding).astype(jnp.float32),
                keys=to_jax(keys),
                blocks=to_jax(dict(module.blocks.template.named_parameters())),
                outer=_outer(module),
                reuse=reuse,
            )
        )

    return call(module, params, method, latents, times, keys)


class Inputs(NamedTuple):
    """What the blocks of one step work on; see `_Step.specs` for where each lies.

    tokens      [L, patch values]; tables: two [L, D]; modulation [M, 6, C]; head: shift and scale [2, M, C]
    blocks      stacked weights of the layers, outer: those around them
    """

    tokens: jax.Array
    tables: tuple[jax.Array, ...]
    modulation: jax.Array
    head: jax.Array
    keys: TextKeys
    blocks: Params
    outer: Params
    reuse: Reuse | None = None


class _Step:
    """One step's blocks inside a `jax.shard_map`."""

    def __init__(
        self, module: Any, mesh: Mesh, layout: TokenLayout, first_tokens: int, tokens: int, kept: float | None
    ) -> None:
        """kept: of the blocks of keys, in sparse-linear attention; None: attention to all."""
        platform, config = mesh.devices.flat[0].platform, module.config
        self._logits = getattr(module, LOGITS, None)
        self._mesh, self._layout, self._tokens, self._first = mesh, layout, tokens, first_tokens
        self._heads, self._eps, self._platform = config.num_attention_heads, config.eps, platform
        self._groups = head_groups(mesh, self._heads, layout.head_axes)
        self._kept = kept
        self._key_parts = key_parts(mesh, self._heads, config.attention_head_dim, layout.head_axes)
        self._query_scale = query_scale(config.attention_head_dim)
        self._ops: Ops = ops_for(platform)

    def run(self, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
        """Return [B, L, patch values], float32, without the padding; and the residual, None without `reuse`."""
        branches = inputs.keys["key"].shape[1]
        self._blocks = {
            name: weight_spec(self._mesh, RULES, f"blocks.*.{name}", value.shape[1:], stacked=True)
            for name, value in inputs.blocks.items()
            if not name.startswith(_MADE_ONCE)
        }
        given = inputs._replace(blocks={name: inputs.blocks[name] for name in self._blocks})
        self._local_branches = branches // (self._mesh.shape["dp"] if self._layout.branch_axis else 1)
        specs = (self._specs(given),)
        spec = self._layout.spec
        out = (spec, None if given.reuse is None or given.reuse.skipped is None else spec)
        local = jax.shard_map(self._local, mesh=self._mesh, in_specs=specs, out_specs=out, check_vma=False)
        found, residual = local(given)
        return found[:, : self._tokens], residual

    def _specs(self, inputs: Inputs) -> Inputs:
        tokens = P(self._layout.token_axes)
        branches = inputs.keys["key"].shape[1]
        keys = {name: key_sharding(self._mesh, name, branches).spec for name in inputs.keys}
        reuse = None
        if inputs.reuse is not None:
            skipped = None if inputs.reuse.skipped is None else P(self._layout.branch_axis)
            reuse = Reuse(self._layout.spec, skipped)  # type: ignore[arg-type]
        return Inputs(tokens, (tokens, tokens), P(), P(), keys, self._blocks, P(), reuse)  # type: ignore[arg-type]

    def _local(self, given: Inputs) -> tuple[jax.Array, jax.Array | None]:
        ops, outer, reuse = self._ops, given.outer, given.reuse
        first_rows = self._first - jax.lax.axis_index(self._layout.token_axes) * len(given.tokens)

        def layer(hidden: jax.Array, weights: Params, index: jax.Array) -> jax.Array:
            table = weights["scale_shift_table"] + given.modulation  # [M, 6, C]
            return each(
                lambda one: self._block(one[0], one[1], weights, table, given.tables, first_rows),
                (hidden, self._layer_keys(given.keys, index)),
            )

        embedded = ops.linear(given.tokens, outer["patch_embedding.weight"], outer["patch_embedding.bias"])
        start = jnp.broadcast_to(embedded, (self._local_branches, *embedded.shape))
        depth = len(given.keys["key"])
        residual = None
        if reuse is not None and reuse.skipped is None:
            hidden = start + reuse.residual
        else:
            hidden = scan_layers(
                layer, start, given.blocks, self._blocks, depth=depth, ahead=_AHEAD, platform=self._platform
            )
        if reuse is not None and reuse.skipped is not None:
            old = reuse.skipped[:, None, None]
            residual = jnp.where(old, reuse.residual, hidden - start)
            hidden = jnp.where(old, start + reuse.residual, hidden)
        shift, scale = given.head

        def head(hidden: jax.Array) -> jax.Array:
            normed = ops.layer_norm(hidden, 1 + scale, shift, eps=self._eps, first_rows=first_rows)
            return ops.linear(normed, outer["proj_out.weight"], outer["proj_out.bias"]).astype(jnp.float32)

        return each(head, hidden), residual

    def _layer_keys(self, keys: TextKeys, layer: jax.Array) -> TextKeys:
        """Keys and values of one layer, each [B of this device, L, C]."""
        found = {name: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for name, x in keys.items()}
        return {name: jnp.broadcast_to(x, (self._local_branches, *x.shape[1:])) for name, x in found.items()}

    def _block(
        self,
        x: jax.Array,
        keys: TextKeys,
        w: Params,
        table: jax.Array,
        tables: tuple[jax.Array, ...],
        first_rows: jax.Array,
    ) -> jax.Array:
        """One layer on this device's tokens of one branch; the formula is diffusers' WanTransformerBlock.

        x [t, C]; table [M, 6, C], the modulation in this layer; tables as in `Inputs`
        """
        ops, eps = self._ops, self._eps
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (table[:, i] for i in range(6))

        def of(name: str, x: Any, **more: Any) -> jax.Array:
            return linear(ops, w, name, x, **more)

        def norm(x: jax.Array, scale: jax.Array, shift: jax.Array, name: str, **more: Any) -> Any:
            return ops.layer_norm(x, scale, shift, eps=eps, rounded=rounded_to(w, name), **more)

        def turned(name: str, rows: Any, factor: float, **more: Any) -> Any:
            weight = w[f"attn1.norm_{name}.weight"].astype(jnp.float32) * factor
            rest = {"eps": eps, "groups": self._groups} | more
            return ops.rms_norm_rope(of(f"attn1.to_{name}", rows), weight, tables, **rest)

        mixed, _, gathered = exchanged_attention(
            norm(x, 1 + scale, shift, "attn1.to_q", first_rows=first_rows),
            Projections(
                query=lambda rows: turned("q", rows, self._query_scale),
                key=lambda rows: turned("k", rows, 1, parts=self._key_parts),
                value=lambda rows: of("attn1.to_v", rows, groups=self._groups),
            ),
            heads=self._heads,
            kv_len=self._tokens,
            token_axes=self._layout.token_axes,
            head_axes=self._layout.head_axes,
            platform=self._platform,
            beside=[{name: w[name]} for name in _BESIDE],
            qk=self._logits,
            sparse=None if self._kept is None else SparseLinear(self._kept, *(w[f"{LINEAR}.{one}"] for one in _AFFINE)),
        )
        w = w | gathered
        x = of("attn1.to_out.0", mixed, residual=x, gate=gate, first_rows=first_rows)

        normed = x
        if "norm2.weight" in w:
            normed = norm(x, w["norm2.weight"][None], w["norm2.bias"][None], "attn2.to_q")
        weight = w["attn2.norm_q.weight"].astype(jnp.float32) * self._query_scale
        q = ops.rms_norm_rope(of("attn2.to_q", normed), weight, None, eps=eps)
        told = attention(q, keys["key"], keys["value"], heads=self._heads, platform=self._platform)
        if "image_key" in keys:
            image = keys["image_key"], keys["image_value"]
            told = told + attention(q, *image, heads=self._heads, platform=self._platform)
        x = of("attn2.to_out.0", told, residual=x)

        normed = norm(x, 1 + ffn_scale, ffn_shift, "ffn.net.0.proj", first_rows=first_rows)
        inner = of("ffn.net.0.proj", normed, activation="gelu_tanh")
        return of("ffn.net.2", inner, residual=x, gate=ffn_gate, first_rows=first_rows)


# Used before or right after self-attention, which takes most of a layer: gathered during that of the layer before.
_AHEAD = tuple(f"attn1.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0"))
_BESIDE = ("ffn.net.0.proj.weight", "ffn.net.2.weight")  # gathered while self-attention is computed
_AFFINE = ("weight", "bias")
_MADE_ONCE = ("attn2.to_k", "attn2.to_v", "attn2.norm_k", "attn2.add_", "attn2.norm_added_k")  # by `text_keys`


def _embed_time(module: Any, times: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """times [M] -> embedding [M, C], modulation of the blocks [M, 6, C]."""
    embedder = module.condition_embedder
    wave = embedder.timesteps_proj(times).to(next(iter(embedder.time_embedder.parameters())).dtype)
    embedding = embedder.time_embedder(wave).to(dtype)
    return embedding, embedder.time_proj(embedder.act_fn(embedding)).unflatten(1, (6, -1))


def _head_modulation(module: Any, embedding: torch.Tensor) -> jax.Array:
    """Shift and scale before the output, [2, M, C]."""
    return to_jax(module.scale_shift_table + embedding[:, None]).swapaxes(0, 1)


def _outer(module: Any) -> Params:
    """The weights around the blocks; the patch embedding's convolution as a matrix [C, patch values]."""
    weight = to_jax(module.patch_embedding.weight)
    return {
        "patch_embedding.weight": weight.reshape(weight.shape[0], -1),
        "patch_embedding.bias": to_jax(module.patch_embedding.bias),
        "proj_out.weight": to_jax(module.proj_out.weight),
        "proj_out.bias": to_jax(module.proj_out.bias),
    }
