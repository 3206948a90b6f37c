"""Qwen3-VL's vision tower: turns patches of keyframes into tokens for the text encoder, for its input and layers.

Shapes: k keyframes of one size, h w rows and columns of tokens, n = h * w, p = 4 n patches, C channels of the tower, O
of the text encoder, N heads, D head width.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import Mesh

from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.families.minimax_h3.vision.pictures import CHANNELS, MERGE, PATCH
from wan_tpu.families.shared import t5
from wan_tpu.families.shared.flop_count import count
from wan_tpu.runtime.bridge import Params, call, select_part, to_jax, to_torch
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.runtime.mesh import AXES, Rule

# Heads and hidden units are split over all devices.
_RULES = (
    Rule(r".*(attn\.qkv|linear_fc1)\.weight", (AXES, None)),
    Rule(r".*(attn\.qkv|linear_fc1)\.bias", (AXES,)),
    Rule(r".*(attn\.proj|linear_fc2)\.weight", (None, AXES)),
    Rule(r".*(attn\.proj|linear_fc2)\.bias|(.*norm\d?|patch_embed\.proj)\.(weight|bias)|pos_embed\.weight", ()),
)
# Qwen3VLForConditionalGeneration has these parts, too.
_UNUSED = (r"^(model\.)?(language_model|embed_tokens|layers|norm)\.", r"(^|\.)lm_head\.")
_PREFIX = r"^(model\.)?visual\."


def vision(config: MiniMaxH3Config) -> Component:
    """Return the vision tower, with queries, keys and values of each head side by side, so that heads can be split."""
    heads = config.vision["num_heads"]

    def build() -> torch.nn.Module:
        module = t5.from_transformers(transformers.Qwen3VLVisionModel, config.vision)
        module._keys_to_ignore_on_load_unexpected = _UNUSED
        return module

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        module.rotary_pos_emb = torch.nn.Identity()
        for block in module.get_submodule("blocks"):
            block.attn.forward = functools.partial(_attend, block.attn)

    def group(values: np.ndarray) -> np.ndarray:
        per_head = values.reshape(3, heads, -1, *values.shape[1:]).swapaxes(0, 1)
        return np.ascontiguousarray(per_head).reshape(values.shape)

    return Component(
        folder="text_encoder",
        build=build,
        adapt=adapt,
        scanned=("blocks",),
        rules=_RULES,
        renames=((_PREFIX, ""),),
        changes=((r"blocks\.\*\.attn\.qkv\.(weight|bias)", group),),
    )


def encode_pictures(tower: Loaded, patches: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return tokens [k, n, O] for the text encoder's input, and [layers, k, n, O] for its first layers' outputs.

    Args:
        tower: From `vision`.
        patches: From `pictures.cut_patches` or `cut_pairs`, uint8 [k, h, w, ...].
    """
    module, params = tower.module, tower.params
    images, height, width, _ = patches.shape
    grid = MERGE * height, MERGE * width
    hidden_states = call(module.patch_embed, select_part(params, "patch_embed"), _embed, normalise(patches))
    places = _interpolate(params["pos_embed.weight"], grid)
    hidden_states = hidden_states + places.astype(hidden_states.dtype)
    position_embeddings = _turn(module.config, grid)
    blocks = module.blocks
    # Each block output that is used has its own place; all others are written to one place after them.
    used = list(module.config.deepstack_visual_indexes)
    slots = np.array([used.index(i) if i in used else len(used) for i in range(blocks.depth)], np.int32)

    def step(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, Params]) -> tuple[Any, None]:
        hidden_states, features = carry
        slot, weights = inputs
        hidden_states = call(blocks.template, weights, _run_block, hidden_states, position_embeddings)
        return (hidden_states, jax.lax.dynamic_update_index_in_dim(features, hidden_states, slot, 0)), None

    start = hidden_states, jnp.zeros((len(used) + 1, *hidden_states.shape), hidden_states.dtype)
    (hidden_states, features), _ = jax.lax.scan(
        step, start, (jnp.asarray(slots), select_part(params, "blocks.template"))
    )

    def merge(name: str, hidden_states: jax.Array) -> jax.Array:
        merged = call(
            module.get_submodule(name), select_part(params, name), torch.nn.Module.__call__, _flatten(hidden_states)
        )
        return merged.reshape(images, height * width, -1)

    deepstack = [merge(f"deepstack_merger_list.{i}", features[i]) for i in range(len(used))]
    return merge("merger", hidden_states), jnp.stack(deepstack)


def _flatten(hidden_states: jax.Array) -> jax.Array:
    return hidden_states.reshape(-1, hidden_states.shape[-1])


def normalise(patches: jax.Array) -> jax.Array:
    """Return patches of pixels from 0 to 255 as the tower expects them, float32 [k, p, values] around [-1, 1].

    A patch has two frames, which are the same for an image.
    """
    values = patches.shape[-1] // MERGE**2
    pixels = patches.reshape(len(patches), -1, values // PATCH**2, PATCH**2).astype(jnp.float32) / 255
    frames = jnp.repeat((pixels - 0.5) / 0.5, 2 * CHANNELS * PATCH**2 // values, axis=2)
    return frames.reshape(*frames.shape[:2], -1)


def _embed(embedding: torch.nn.Module, patches: torch.Tensor) -> torch.Tensor:
    """Compute the convolution, whose kernel is as large as a patch, as a matrix product."""
    weight = embedding.proj.weight
    return torch.nn.functional.linear(patches.to(weight.dtype), weight.flatten(1), embedding.proj.bias)


def _order(values: jax.Array, height: int, width: int) -> jax.Array:
    """Reorder values of each patch [4 h w, ...] from rows of patches to tokens of four patches."""
    tokens = values.reshape(height // MERGE, MERGE, width // MERGE, MERGE, *values.shape[2:])
    return jnp.swapaxes(tokens, 1, 2).reshape(height * width, *values.shape[2:])


def _interpolate(table: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """Return the embedding of each patch's position, float32 [p, C], from a square table of embeddings."""
    side = math.isqrt(len(table))
    square = table.astype(jnp.float32).reshape(side, side, -1)
    rows, columns = (jnp.asarray(_weigh(size, side)) for size in grid)
    exact = jax.lax.Precision.HIGHEST
    across = jnp.einsum("wj,ijc->iwc", columns, square, precision=exact)
    return _order(jnp.einsum("hi,iwc->hwc", rows, across, precision=exact), *grid)


def _weigh(size: int, side: int) -> np.ndarray:
    """Return the weight of each row of the table in each row of patches, float32 [size, side].

    Rows of patches are spread evenly over those of the table, from the first to the last.
    """
    places = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    return np.maximum(1 - np.abs(places[:, None] - np.arange(side, dtype=np.float32)), 0).astype(np.float32)


def _turn(config: transformers.Qwen3VLVisionConfig, grid: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of each patch's angles, float32 [p, 1, D/2]: those of its row, those of its column."""
    quarter = config.hidden_size // config.num_heads // 4
    # The host computes them, because a TPU's powers are off by a few roundings.
    exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
    speeds = np.float32(1) / np.float32(config.rope_parameters["rope_theta"]) ** exponents
    rows, columns = (np.arange(size, dtype=np.float32)[:, None] * speeds for size in grid)
    angles = jnp.concatenate(
        [
            jnp.broadcast_to(rows[:, None], (*grid, quarter)),
            jnp.broadcast_to(columns[None], (*grid, quarter)),
        ],
        axis=-1,
    )
    sorted_angles = _order(angles, *grid)[:, None]
    return jnp.cos(sorted_angles), jnp.sin(sorted_angles)


def _run_block(
    block: torch.nn.Module, hidden_states: torch.Tensor, position_embeddings: Sequence[torch.Tensor]
) -> torch.Tensor:
    return block(hidden_states, cu_seqlens=None, position_embeddings=position_embeddings)


def _attend(
    attention: torch.nn.Module, hidden_states: torch.Tensor, position_embeddings: Sequence[torch.Tensor], **_: None
) -> torch.Tensor:
    """Compute an attention's output, [k, p, C], of each image by itself, with logits in float32."""
    projected = to_jax(attention.qkv(hidden_states).unflatten(-1, (attention.num_heads, 3, -1)))
    query, key, value = (projected[..., i, :] for i in range(3))
    cos, sin = to_jax(tuple(position_embeddings))

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    attended = jax.nn.dot_product_attention(rotate(query), rotate(key), value, scale=attention.scaling)
    return attention.proj(to_torch(attended).flatten(2))


def count_flops(config: MiniMaxH3Config, grid: tuple[int, int], images: int) -> int:
    """Count the operations of encoding keyframes (a multiply-add is two) on transformers' own module.

    Args:
        config: The model's configuration.
        grid: Rows and columns of tokens of each.
        images: The number of images.
    """
    patches = MERGE**2 * math.prod(grid)

    def run(module: Any) -> None:
        # Values that transformers would compute from tensors, which have no values here.
        module(
            torch.empty(patches, 2 * CHANNELS * PATCH**2),
            grid_thw=None,
            interp_indices=torch.empty(patches, 4, dtype=torch.int64),
            interp_weights=torch.empty(patches, 4),
            position_ids=torch.empty(patches, 2),
            cu_seqlens=torch.tensor([0, patches], device="cpu"),
        )

    return images * count(lambda: t5.from_transformers(transformers.Qwen3VLVisionModel, config.vision), run)
