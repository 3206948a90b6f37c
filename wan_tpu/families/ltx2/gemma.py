"""Gemma 3 and Gemma 4, the text encoders of LTX-2: layers with a window and layers without one.

After some layers with a window comes one that sees all tokens before. In Gemma 4, heads of that one are larger, and its
values are its keys. The scan runs over such groups: each is traced once, however many there are.

Shapes: B batch, L tokens, C channels, D head width.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import torch
import transformers
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2.connectors import TEXT_TOKENS, rotate
from wan_tpu.families.shared import t5
from wan_tpu.runtime.bridge import Params, call, select_part, to_jax, to_torch
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.runtime.mesh import AXES, Rule

T = TypeVar("T")
WINDOW, FULL = "sliding_attention", "full_attention"  # The kinds of layers.
# Shardings of Gemma (12 G parameters, 24 GB): projections [O outputs, I inputs] are split by outputs or inputs over all
# devices, because no other stage runs meanwhile.
_COLUMNS, _ROWS = (AXES, None), (None, AXES)
_RULES = (
    # [vocabulary, C]. If the table were split by channels, a TPU would copy its whole part before every look-up.
    Rule(r"embed_tokens\.weight", _COLUMNS),
    Rule(r"layers\..*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight", _COLUMNS),
    Rule(r"layers\..*\.(o_proj|down_proj)\.weight", _ROWS),
    Rule(r".*(norm\.weight|layer_scalar)", ()),
)
# Gemma's checkpoints have these parts, too: they read images and sounds, and write text.
_UNUSED = (
    *(r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\.", r"(^|\.)lm_head\."),
    *(r"(^|\.)embed_vision\.", r"(^|\.)vision_embedder\.", r"(^|\.)embed_audio\.", r"(^|\.)audio_projector\."),
    r"(^|\.)vision_model\.",
)
# Their weights are "model.language_model.layers...", or as other versions of transformers saved them.
_PREFIX = r"^((model|language_model)\.)+"


class _Version(NamedTuple):
    """A version of Gemma.

    Attributes:
        name: For people.
        of: The LTX-2 that was published with it.
        model: Its class in transformers.
        refused: For each option, values that aren't supported; an empty tuple for all that are true.
    """

    name: str
    of: str
    model: type[Any]
    refused: Mapping[str, tuple[Any, ...]]


_3 = _Version(
    "Gemma 3",
    "LTX-2",
    transformers.Gemma3TextModel,
    {"attn_logit_softcapping": (), "use_bidirectional_attention": ()},
)
# Larger and smaller models than the 12B have these.
_4 = _Version(
    "Gemma 4 12B",
    "LTX-2.5",
    transformers.Gemma4UnifiedTextModel,
    {
        **dict.fromkeys(("num_kv_shared_layers", "attention_bias", "hidden_size_per_layer_input"), ()),
        "enable_moe_block": (),
        "use_bidirectional_attention": ("all",),
    },
)


def _find_version(config: Mapping[str, Any]) -> _Version:
    return _4 if str(config.get("model_type", "")).startswith("gemma4") else _3


def build(config: Mapping[str, Any]) -> torch.nn.Module:
    """Return transformers' own language model for its settings."""
    module = t5.from_transformers(_find_version(config).model, config)
    module._keys_to_ignore_on_load_unexpected = _UNUSED
    return module


def text_encoder(config: Mapping[str, Any]) -> Component:
    """Return the language model, without the parts for images and sounds, its layers in equal groups.

    Raises:
        CheckpointError: Its configuration asks for something that the published Gemma doesn't have.
    """
    version = _find_version(config)
    for option, values in version.refused.items():
        value = config.get(option)
        if value in values if values else value:
            raise CheckpointError(
                f"text_encoder/config.json has {option} {value!r}, which isn't supported; {version.of} was published "
                f"with {version.name}, which doesn't have it"
            )
    kinds = list(t5.complete_config(version.model, config).layer_types)
    size = _find_period(kinds)

    def build_groups() -> torch.nn.Module:
        module = build(config)
        layers: Any = module.layers
        groups = [torch.nn.ModuleList(layers[first : first + size]) for first in range(0, len(kinds), size)]
        module.layers = torch.nn.ModuleList(groups)
        return module

    return Component(
        folder="text_encoder",
        build=build_groups,
        adapt=_adapt,
        scanned=("layers",),
        rules=_RULES,
        renames=(
            (_PREFIX, ""),
            *((rf"^layers\.{number}\.", f"layers.{number // size}.{number % size}.") for number in range(len(kinds))),
        ),
    )


def run_layers(
    encoder: Loaded,
    visible: jax.Array,
    carry: tuple[jax.Array, T],
    add: Callable[[T, jax.Array, jax.Array], T],
) -> tuple[jax.Array, T]:
    """Run all layers on (hidden states [B, L, C], sums), and call `add` with each layer's input and its number.

    Args:
        encoder: From `text_encoder`.
        visible: Which keys a query may see in layers without a window, bool [B, 1, L, L].
        carry: The embeddings, and the sums so far.
        add: Returns new sums.
    """
    module, params = encoder.module, encoder.params
    group, config = module.layers.template, module.config
    kinds = config.layer_types[: len(group)]
    distance = jnp.arange(TEXT_TOKENS)[:, None] - jnp.arange(TEXT_TOKENS)  # A query's position less a key's.
    seen = {FULL: visible, WINDOW: visible & (distance < (config.sliding_window or TEXT_TOKENS))}
    tables = {kind: tuple(params[f"rotary_emb.{name}_{kind}"] for name in ("cos", "sin")) for kind in set(kinds)}

    def step(carry: tuple[jax.Array, T], inputs: tuple[jax.Array, Params]) -> tuple[tuple[jax.Array, T], None]:
        hidden_states, sums = carry
        number, weights = inputs
        for i, (layer, kind) in enumerate(zip(group, kinds, strict=True)):
            sums = add(sums, hidden_states, number * len(group) + i)
            part = select_part(weights, str(i))
            hidden_states = call(layer, part, _run_layer, hidden_states, tables[kind], seen[kind])
        return (hidden_states, sums), None

    stacked = jnp.arange(module.layers.depth), select_part(params, "layers.template")
    result, _ = jax.lax.scan(step, carry, stacked)
    return result


def _find_period(kinds: list[str]) -> int:
    """Return the length of the shortest group of layers which the rest repeats."""
    return next(n for n in range(1, len(kinds) + 1) if kinds == kinds[:n] * (len(kinds) // n))


def _adapt(module: torch.nn.Module, mesh: Mesh) -> None:
    """Replace attention, and the rotary embedding by tables of each kind of layer, [L, 1, D/2]."""
    positions = torch.arange(TEXT_TOKENS)[None]
    rotary, module.rotary_emb = module.rotary_emb, torch.nn.Module()
    for kind in set(module.config.layer_types):
        for name, table in zip(("cos", "sin"), rotary(torch.empty(0), positions, kind), strict=True):
            half = table[0].chunk(2, dim=-1)[0]  # Each angle is there twice.
            module.rotary_emb.register_buffer(f"{name}_{kind}", half[:, None].contiguous(), persistent=False)
    for group in module.layers:
        for layer in group:
            layer.self_attn.forward = functools.partial(_attend, layer.self_attn)


def _run_layer(
    layer: torch.nn.Module, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], visible: torch.Tensor
) -> torch.Tensor:
    return layer(hidden, position_embeddings=rotation, attention_mask=visible)


def _attend(
    attention: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    **_: None,
) -> tuple[torch.Tensor, None]:
    """Compute an attention's output, [B, L, C], with logits in float32. A row of padding sees nothing: it is a mean."""
    heads = (-1, attention.head_dim)
    query, key = (layer(hidden_states).unflatten(2, heads) for layer in (attention.q_proj, attention.k_proj))
    value = key if attention.v_proj is None else attention.v_proj(hidden_states).unflatten(2, heads)
    if hasattr(attention, "v_norm"):
        value = attention.v_norm(value)
    cos, sin = to_jax(position_embeddings)
    query, key = (rotate(to_jax(x), cos, sin) for x in (attention.q_norm(query), attention.k_norm(key)))
    attended = jax.nn.dot_product_attention(
        query, key, to_jax(value), mask=to_jax(attention_mask), scale=attention.scaling
    )
    return attention.o_proj(to_torch(attended).flatten(2)), None
