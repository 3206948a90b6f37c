"""Encodes a prompt for MiniMax-H3 with Qwen3-VL's language model, alone or together with keyframes (vision/).

The prompt is read as it is, without a template. Padding is on the right, where no row before it sees it.

Shapes: R rows of text, C channels, D head width, k keyframes of n tokens each.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import Mesh

from wan_tpu.errors import InvalidRequest
from wan_tpu.families.minimax_h3.config import TEXT_ROWS, MiniMaxH3Config, fit_rows
from wan_tpu.families.minimax_h3.layers import attend_in_parts
from wan_tpu.families.shared import t5
from wan_tpu.families.shared.flop_count import count
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.bridge import Params, call, select_part, to_jax, to_torch
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.runtime.mesh import AXES, Rule

# Shardings of Qwen (25 G parameters in 50 layers, 52 GB): projections [O outputs, I inputs] are split by outputs or
# inputs over all devices, because no other stage runs meanwhile.
_COLUMNS, _ROWS = (AXES, None), (None, AXES)
_RULES = (
    # [vocabulary, C]. If the table were split by channels, a TPU would copy its whole part before every look-up.
    Rule(r"embed_tokens\.weight", _COLUMNS),
    Rule(r"layers\..*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight", _COLUMNS),
    Rule(r"layers\..*\.(q_proj|k_proj|v_proj)\.bias", (AXES,)),
    Rule(r"layers\..*\.(o_proj|down_proj)\.weight", _ROWS),
    Rule(r".*(norm\.weight|o_proj\.bias)", ()),
)
# Qwen3VLForConditionalGeneration has these parts, too.
_UNUSED = (r"(^|\.)visual\.", r"(^|\.)lm_head\.")
_PREFIX = r"^((model|language_model)\.)+"


class VisionOutput(NamedTuple):
    """The vision tower's output for keyframes or references, which replaces rows of the presentation.

    Attributes:
        starts: int32 [k], the index of the first of each image's rows.
        tokens: For each, [n, C], which take the place of the embeddings of these rows.
        deepstack: For each of the first layers, the same, which are added to these rows behind it.
    """

    starts: jax.Array
    tokens: Sequence[jax.Array]
    deepstack: Sequence[Sequence[jax.Array]]


def tokenize_prompt(shared: Tokenizer, prompt: str) -> tuple[np.ndarray, int, list[Cut]]:
    """Return a prompt's ids, int32 [1, R], the number of real ones, and the cut if it is too long.

    Raises:
        CheckpointError: The tokenizer doesn't work.
        InvalidRequest: The prompt is empty: there would be no row to attend to.
    """
    with shared.lock() as tokenizer:
        words, cuts = read_words(tokenizer, prompt, TEXT_ROWS[-1])
        padded = [pad_rows(words, fit_rows(len(words)))]
        ids, _ = shared.to_arrays({"input_ids": padded, "attention_mask": padded})
    if not words:
        raise InvalidRequest("prompt is empty, but MiniMax-H3 needs one: describe what happens in the video", "prompt")
    return ids, len(words), cuts


def read_words(tokenizer: Any, prompt: str, room: int) -> tuple[list[int], list[Cut]]:
    """Return a prompt's ids, at most `room` of them, and the cut if there were more."""
    ids: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) <= room:
        return ids, []
    return ids[:room], [Cut(len(ids), room, tokenizer.decode(ids[room - 8 : room]))]


def pad_rows(ids: Sequence[int], rows: int) -> list[int]:
    """Return ids followed by padding."""
    return [*ids, *[0] * (rows - len(ids))]


def text_encoder(config: MiniMaxH3Config) -> Component:
    """Return Qwen3-VL's language model without the layers and the norm after the layer whose output is used."""

    def build() -> torch.nn.Module:
        module = t5.from_transformers(transformers.Qwen3VLTextModel, config.text_encoder)
        module._keys_to_ignore_on_load_unexpected = _UNUSED
        return module

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        module.layers = module.get_submodule("layers")[: config.text_layer]
        module.norm = torch.nn.Identity()
        for layer in module.layers:
            layer.self_attn.forward = functools.partial(_attend, layer.self_attn)

    return Component(
        folder="text_encoder",
        build=build,
        adapt=adapt,
        scanned=("layers",),
        rules=_RULES,
        renames=((_PREFIX, ""),),
    )


def encode_prompt(
    encoder: Loaded,
    ids: jax.Array,
    places: jax.Array | None = None,
    picture: VisionOutput | None = None,
) -> jax.Array:
    """Return the output of the encoder's last layer, [1, R, C].

    Args:
        encoder: From `text_encoder`.
        ids: int32 [1, R].
        places: int32 [3, R]: time, height and width of each row, which differ where there are images; by default all
            are the row's index.
        picture: The keyframes, where there are any.
    """
    module, params = encoder.module, encoder.params
    rows = ids.shape[1]
    if places is None:
        places = jnp.broadcast_to(jnp.arange(rows), (3, rows))
    hidden_states = call(module.embed_tokens, select_part(params, "embed_tokens"), torch.nn.Module.__call__, ids)[0]
    layers = encoder.module.layers
    template, stacked = layers.template, select_part(params, "layers.template")
    position_embeddings = _turn(module.config, places)
    additions = None
    if picture is not None:
        hidden_states = _put(hidden_states, picture.starts, picture.tokens)
        zeros = jnp.zeros_like(hidden_states)
        additions = jnp.stack([_put(zeros, picture.starts, values) for values in picture.deepstack])

    def step(hidden_states: jax.Array, inputs: tuple[jax.Array, Params]) -> tuple[jax.Array, None]:
        index, weights = inputs
        hidden_states = call(template, weights, _run_layer, hidden_states, position_embeddings)
        if additions is not None:
            added = additions[jnp.minimum(index, len(additions) - 1)]
            hidden_states = hidden_states + jnp.where(index < len(additions), added, 0)
        return hidden_states, None

    hidden_states, _ = jax.lax.scan(step, hidden_states, (jnp.arange(layers.depth), stacked))
    result: jax.Array = hidden_states[None]
    return result


def _put(hidden_states: jax.Array, starts: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    """Replace the rows [R, C] that begin at `starts` by values, each [n, C]."""
    for start, rows in zip(starts, values, strict=True):
        hidden_states = jax.lax.dynamic_update_slice_in_dim(
            hidden_states, rows.astype(hidden_states.dtype), start, axis=0
        )
    return hidden_states


def _turn(config: transformers.Qwen3VLTextConfig, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of each row's angles, float32 [R, D/2] each.

    Every third angle is of height, and every third of width, as far as these have angles; all others are of time.
    """
    rope, half = config.rope_parameters, config.head_dim // 2
    # The host computes them, since a TPU's powers are off by some roundings, which a row's index enlarges.
    exponents = np.arange(0, 2 * half, 2, dtype=np.float32) / np.float32(2 * half)
    speeds = np.float32(1) / np.float32(rope["rope_theta"]) ** exponents
    axes: np.ndarray = np.zeros(half, np.int32)
    for axis, size in enumerate(rope["mrope_section"][1:], start=1):
        axes[axis : 3 * size : 3] = axis
    angles = places.astype(jnp.float32)[axes].T * speeds
    return jnp.cos(angles), jnp.sin(angles)


def _run_layer(
    layer: torch.nn.Module, hidden_states: torch.Tensor, position_embeddings: Sequence[torch.Tensor]
) -> torch.Tensor:
    return layer(hidden_states, position_embeddings=position_embeddings, attention_mask=None)


def _attend(
    attention: torch.nn.Module, hidden_states: torch.Tensor, position_embeddings: Sequence[torch.Tensor], **_: None
) -> tuple[torch.Tensor, None]:
    """Compute a causal attention's output, [R, C], with logits in float32."""
    heads = (-1, attention.head_dim)
    query, key, value = (
        projection(hidden_states).unflatten(1, heads)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cos, sin = (table[:, None] for table in to_jax(tuple(position_embeddings)))

    def rotate(x: torch.Tensor) -> jax.Array:
        # As in transformers, the tables have the activations' dtype.
        values = to_jax(x)
        first, second = jnp.split(values, 2, axis=-1)
        by, across = cos.astype(values.dtype), sin.astype(values.dtype)
        return jnp.concatenate([first * by - second * across, second * by + first * across], axis=-1)

    query, key = rotate(attention.q_norm(query)), rotate(attention.k_norm(key))

    def attend(query: jax.Array, indices: jax.Array) -> jax.Array:
        causal = {"is_causal": True} if len(query) == len(key) else {"mask": indices[:, None] >= jnp.arange(len(key))}
        attended: jax.Array = jax.nn.dot_product_attention(
            query[None], key[None], to_jax(value)[None], scale=attention.scaling, **causal
        )[0]
        return attended

    return attention.o_proj(to_torch(attend_in_parts(attend, query)).flatten(1)), None


def count_flops(config: MiniMaxH3Config, rows: int) -> int:
    """Count the operations of encoding rows of text and keyframes (a multiply-add is two) on transformers' module."""
    ids = torch.ones(1, rows, dtype=torch.int32, device="meta")

    def build() -> torch.nn.Module:
        return t5.from_transformers(
            transformers.Qwen3VLTextModel, config.text_encoder | {"num_hidden_layers": config.text_layer}
        )

    mask = torch.zeros(1, 1, rows, rows, device="meta")
    return count(build, lambda module: module(ids, attention_mask=mask, use_cache=False))
