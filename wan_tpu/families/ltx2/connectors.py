"""The connectors of LTX-2: they turn Gemma's hidden states into the text that video and sound attend to.

The projections take all hidden states of a token at once: the embedding and each layer's output. As sums over layers,
they are computed while Gemma runs, so that its states (385 MB for 1,024 tokens) are never kept. Two stacks of blocks
follow, one for each stream, in which learned registers take the place of padding.

Shapes: B batch, L tokens, C channels of Gemma, O of a projection, N heads, D head width.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.shared.tokens import half_split
from wan_tpu.runtime.bridge import call, select_part, to_jax, to_torch
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.runtime.mesh import AXES, Rule

TEXT_TOKENS = 1024  # Tokens of every prompt, padding included.
STREAMS = ("video", "audio")

# Prefixes of their tensors in adapters' files: in diffusers' names, and in LTX-2's own.
ADAPTED_BY = ("connectors.", "text_embedding_projection.")
# Shardings of projections [O outputs, I inputs] (3 G parameters), over all devices as Gemma's are.
_COLUMNS, _ROWS = (AXES, None), (None, AXES)
_PROJECTIONS = r"((video|audio)_)?text_proj_in\.weight"
_RULES = (
    Rule(_PROJECTIONS, _COLUMNS),
    Rule(r"((video|audio)_)?text_proj_in\.bias", (AXES,)),
    Rule(r".*\.learnable_registers", ()),
    Rule(r".*\.attn1\.(to_q|to_k|to_v|to_gate_logits)\.weight", _COLUMNS),
    Rule(r".*\.attn1\.(to_q|to_k|to_v|to_gate_logits)\.bias", (AXES,)),
    Rule(r".*\.attn1\.norm_[qk]\.weight", (AXES,)),
    Rule(r".*\.ff\.net\.0\.proj\.weight", _COLUMNS),
    Rule(r".*\.ff\.net\.0\.proj\.bias", (AXES,)),
    Rule(r".*\.(attn1\.to_out\.0|ff\.net\.2)\.weight", _ROWS),
    Rule(r".*\.(attn1\.to_out\.0|ff\.net\.2)\.bias", ()),
)
_EPSILON = 1e-6  # Epsilon of the norms of Gemma's states.
_RANGE_FACTOR = 8.0  # LTX-2.0's states have this range in each layer.


def connectors(config: Ltx2Config) -> Component:
    """Return the projections and both stacks of blocks.

    Raises:
        CheckpointError: They don't fit Gemma, or a stack has no registers: padding would have to be masked, in the
            transformer too.
    """
    _check(config)
    layers = config.connectors["text_proj_in_factor"]
    changes = [(_PROJECTIONS, functools.partial(_order_by_layer, layers))]
    if config.connectors["rope_type"] == "interleaved":
        for stream in STREAMS:
            heads = config.connectors[f"{stream}_connector_num_attention_heads"]
            paired = rf"{stream}_connector\.transformer_blocks\.\*\.attn1\.(to_[qk]\.(weight|bias)|norm_[qk]\.weight)"
            changes.append((paired, functools.partial(half_split, heads)))
    return Component(
        folder="connectors",
        build=lambda: LTX2TextConnectors.from_config(config.connectors),
        adapt=_adapt,
        scanned=tuple(f"{stream}_connector.transformer_blocks" for stream in STREAMS),
        rules=_RULES,
        changes=tuple(changes),
        changed_inputs=(_PROJECTIONS,),
        originals=((r"text_proj_in\.", "aggregate_embed."),),
        adapted_by=ADAPTED_BY,
    )


def project_state(
    connectors: Loaded, hidden_states: jax.Array, mask: jax.Array, layer: int | jax.Array
) -> dict[str, jax.Array]:
    """Return a hidden state's contribution to the projections' outputs, float32 [B, L, O], by projection name.

    Args:
        connectors: The connectors.
        hidden_states: The state, [B, L, C].
        mask: 1 for tokens of the prompt, 0 for padding, [B, L].
        layer: The state's number: 0 for the embedding.
    """
    channels = hidden_states.shape[-1]
    normalize = _divide_by_rms if connectors.module.config["per_modality_projections"] else _divide_by_range
    valid = mask[..., None] > 0
    rows = jnp.where(valid, normalize(hidden_states.astype(jnp.float32), valid), 0).astype(hidden_states.dtype)
    added = {}
    for name in _list_projections(connectors.module):
        weight = connectors.params[f"{name}.weight"]
        part = jax.lax.dynamic_slice_in_dim(weight, layer * channels, channels, axis=1)
        added[name] = jnp.einsum("blc,oc->blo", rows, part, preferred_element_type=jnp.float32)
    return added


def connect(connectors: Loaded, projected: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Return the text that the transformer reads: "text" for video and "audio_text", [B, L, O].

    Args:
        connectors: The connectors.
        projected: The sums of `project_state` over all hidden states.
        mask: 1 for tokens of the prompt, 0 for padding, [B, L]. Padding is on the left.
    """
    module, params = connectors.module, connectors.params
    count = mask.sum(axis=1)
    outputs = {}
    for stream in STREAMS:
        name = f"{stream}_text_proj_in" if module.config["per_modality_projections"] else "text_proj_in"
        rows = projected[name] * _find_scale(module, stream)
        if f"{name}.bias" in params:
            rows += params[f"{name}.bias"].astype(jnp.float32)
        stack = f"{stream}_connector"
        front = _replace_padding(
            rows.astype(params[f"{name}.weight"].dtype), params[f"{stack}.learnable_registers"], count
        )
        outputs[stream] = call(module.get_submodule(stack), select_part(params, stack), _run_stack, front)
    return {"text": outputs["video"], "audio_text": outputs["audio"]}


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + D/2) of heads [B, L, N, D] by angles [L, N or 1, D/2], in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _check(config: Ltx2Config) -> None:
    width, layers = (config.text_encoder.get(key) for key in ("hidden_size", "num_hidden_layers"))
    fitting = {"caption_channels": width, "text_proj_in_factor": (layers or 0) + 1}
    for key, value in fitting.items():
        if config.connectors[key] != value:
            raise CheckpointError(
                f"connectors/config.json has {key} {config.connectors[key]}; for a text encoder with hidden_size "
                f"{width} and num_hidden_layers {layers} it must be {value}"
            )
    for stream in STREAMS:
        registers = config.connectors[f"{stream}_connector_num_learnable_registers"]
        if not registers or TEXT_TOKENS % registers:
            raise CheckpointError(
                f"connectors/config.json has {registers} learnable registers for {stream}; supported: a number that "
                f"divides {TEXT_TOKENS}, such as 128"
            )


def _order_by_layer(layers: int, weight: np.ndarray) -> np.ndarray:
    """Reorder a projection's inputs from (channel, layer) to (layer, channel): [O, C * layers]."""
    return np.ascontiguousarray(weight.reshape(len(weight), -1, layers).swapaxes(1, 2)).reshape(weight.shape)


def _list_projections(module: torch.nn.Module) -> list[str]:
    return [name for name, _ in module.named_children() if name.endswith("text_proj_in")]


def _divide_by_rms(hidden_states: jax.Array, valid: jax.Array) -> jax.Array:
    """Normalize each token of LTX-2.3, [B, L, C]."""
    return hidden_states * jax.lax.rsqrt(jnp.mean(hidden_states**2, axis=-1, keepdims=True) + _EPSILON)


def _divide_by_range(hidden_states: jax.Array, valid: jax.Array) -> jax.Array:
    """Normalize a state of LTX-2.0 by the mean and range over all channels of the prompt's tokens, [B, L, C]."""
    axes, channels = (1, 2), hidden_states.shape[-1]
    total = jnp.where(valid, hidden_states, 0).sum(axes, keepdims=True)
    mean = total / (valid.sum(axes, keepdims=True) * channels + _EPSILON)
    lowest = jnp.where(valid, hidden_states, jnp.inf).min(axes, keepdims=True)
    highest = jnp.where(valid, hidden_states, -jnp.inf).max(axes, keepdims=True)
    return (hidden_states - mean) / (highest - lowest + _EPSILON) * _RANGE_FACTOR


def _find_scale(module: torch.nn.Module, stream: str) -> float:
    """Return the factor of a stream's projection, which LTX-2.3 has."""
    config = module.config
    if not config["per_modality_projections"]:
        return 1.0
    return math.sqrt(config[f"{stream}_hidden_dim"] / config["caption_channels"])


def _replace_padding(rows: jax.Array, registers: jax.Array, count: jax.Array) -> jax.Array:
    """Move each prompt's tokens, the last `count` [B] of [B, L, O], to the front, and fill the rest with registers."""
    front = jax.vmap(lambda prompt, shift: jnp.roll(prompt, shift, axis=0))(rows, count)
    filling = jnp.tile(registers, (rows.shape[1] // len(registers), 1))
    used = jnp.arange(rows.shape[1]) < count[:, None]
    return jnp.where(used[..., None], front, filling.astype(rows.dtype))


def _adapt(module: torch.nn.Module, mesh: Mesh) -> None:
    """Replace attention, and the rotary embedding by tables that torch computes on the host, in float64."""
    for stream in STREAMS:
        stack = module.get_submodule(f"{stream}_connector")
        cos, sin = (_order_by_head(table, stack) for table in stack.rope(1, TEXT_TOKENS, "cpu"))
        stack.rope = torch.nn.Module()
        stack.rope.register_buffer("cos", cos, persistent=False)
        stack.rope.register_buffer("sin", sin, persistent=False)
        for block in stack.transformer_blocks:
            block.attn1.forward = functools.partial(_attend, block.attn1)


def _order_by_head(table: torch.Tensor, stack: torch.nn.Module) -> torch.Tensor:
    """Return a rotary table as [L, N, D/2]: one entry for each pair of channels."""
    if stack.rope.rope_type == "split":  # It is [1, N, L, D/2].
        return table[0].swapaxes(0, 1).contiguous()
    return table[0, :, ::2].unflatten(1, (stack.num_attention_heads, -1)).contiguous()  # Of [1, L, N * D].


def _run_stack(stack: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    for block in stack.transformer_blocks:
        hidden_states = block(hidden_states, rotary_emb=(stack.rope.cos, stack.rope.sin))
    return stack.norm_out(hidden_states)


def _attend(
    attention: torch.nn.Module,
    hidden_states: torch.Tensor,
    attention_mask: None,
    query_rotary_emb: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Compute an attention's output, [B, L, O]; registers have replaced padding, so that nothing is masked."""
    heads = (attention.heads, attention.head_dim)
    query, key = attention.norm_q(attention.to_q(hidden_states)), attention.norm_k(attention.to_k(hidden_states))
    query, key, value = (to_jax(x.unflatten(2, heads)) for x in (query, key, attention.to_v(hidden_states)))
    cos, sin = to_jax(query_rotary_emb)
    attended = to_torch(jax.nn.dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value))
    if attention.to_gate_logits is not None:
        attended = attended * (2 * torch.sigmoid(attention.to_gate_logits(hidden_states)))[..., None]
    return attention.to_out[0](attended.flatten(2))
