"""Encodes a prompt for LTX-2: Gemma 3 reads it, and the connectors turn all of its hidden states into two texts.

Shapes: B batch, L tokens, C channels, D head width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2 import connectors as streams
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.ltx2.connectors import TEXT_TOKENS, rotate
from wan_tpu.families.shared import t5
from wan_tpu.families.shared.flop_count import count
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.bridge import call, select_part, to_jax, to_torch
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.runtime.mesh import AXES, Rule

# Shardings of Gemma (12 G parameters, 24 GB): projections [O outputs, I inputs] are split by outputs or inputs over all
# devices, because no other stage runs meanwhile.
_COLUMNS, _ROWS = (AXES, None), (None, AXES)
_RULES = (
    # [vocabulary, C]. If the table were split by channels, a TPU would copy its whole part before every look-up.
    Rule(r"embed_tokens\.weight", _COLUMNS),
    Rule(r"layers\..*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight", _COLUMNS),
    Rule(r"layers\..*\.(o_proj|down_proj)\.weight", _ROWS),
    Rule(r".*norm\.weight", ()),
)
# Gemma3ForConditionalGeneration has these parts, too. Its weights are "model.language_model.layers...", or
# "language_model.model.layers..." as older versions of transformers saved them.
_UNUSED = (r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\.", r"(^|\.)lm_head\.")
_PREFIX = r"^((model|language_model)\.)+"
_KINDS = ("sliding_attention", "full_attention")  # Kinds of layers; a layer's kind is an index into this.
_UNSUPPORTED = ("attn_logit_softcapping", "use_bidirectional_attention")  # Gemma 3 has neither.


def tokenize_prompt(shared: Tokenizer, prompt: str) -> tuple[np.ndarray, np.ndarray, list[Cut]]:
    """Return ids and mask of a prompt, int32 [1, 1024], padded on the left, and the cut if the prompt is too long.

    Raises:
        CheckpointError: The tokenizer doesn't work.
    """
    settings = {"padding": "max_length", "max_length": TEXT_TOKENS, "truncation": True, "return_tensors": "np"}
    prompt, cuts = prompt.strip(), []
    with shared.lock() as tokenizer:
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokens = tokenizer([prompt], **settings)
        token_count = len(tokenizer(prompt, verbose=False)["input_ids"])
        if token_count > TEXT_TOKENS:
            end = tokenizer.decode(tokens["input_ids"][0, -8:], skip_special_tokens=True)
            cuts.append(Cut(token_count, TEXT_TOKENS, end))
        return *shared.to_arrays(tokens), cuts


def text_encoder(config: Ltx2Config) -> Component:
    """Return Gemma 3's language model, without the vision tower.

    Raises:
        CheckpointError: Its configuration asks for something that Gemma 3 doesn't have.
    """
    if options := [key for key in _UNSUPPORTED if config.text_encoder.get(key)]:
        raise CheckpointError(
            f"text_encoder/config.json sets {' and '.join(options)}, which isn't supported; LTX-2 was published with "
            "Gemma 3, which has null or false there"
        )

    def build() -> torch.nn.Module:
        module = t5.from_transformers(transformers.Gemma3TextModel, config.text_encoder)
        module._keys_to_ignore_on_load_unexpected = _UNUSED
        return module

    return Component(
        folder="text_encoder",
        build=build,
        adapt=_adapt,
        scanned=("layers",),
        rules=_RULES,
        renames=((_PREFIX, ""),),
    )


def encode_prompt(encoder: Loaded, connectors: Loaded, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Return the text that the transformer reads: "text" for video and "audio_text", [B, 1024, O].

    The connectors' projections are summed in float32 while Gemma's layers run.

    Args:
        encoder: Gemma, from `text_encoder`.
        connectors: From `connectors.connectors`.
        ids, mask: From `tokenize_prompt`, [B, 1024].
    """
    module, params = encoder.module, encoder.params
    layer = module.layers.template
    kinds = np.array([_KINDS.index(kind) for kind in module.config.layer_types], np.int32)
    causal = jnp.arange(TEXT_TOKENS)[:, None] - jnp.arange(TEXT_TOKENS)  # A query's position less a key's.
    visible = (causal >= 0) & (mask[:, None, None] > 0)  # [B, 1, L, L]
    # A layer of each kind sees only keys that are closer to the query than this.
    reach = np.array([module.config.sliding_window or TEXT_TOKENS, TEXT_TOKENS], np.int32)
    cos, sin = params["rotary_emb.cos"], params["rotary_emb.sin"]

    def add(sums: dict[str, jax.Array], hidden_states: jax.Array, number: int | jax.Array) -> dict[str, jax.Array]:
        return jax.tree.map(jnp.add, sums, streams.project_state(connectors, hidden_states, mask, number))

    def step(carry, inputs):  # type: ignore[no-untyped-def]
        hidden_states, sums = carry
        number, kind, weights = inputs
        sums = add(sums, hidden_states, number)
        near = visible & (causal < jnp.asarray(reach)[kind])
        return (call(layer, weights, _run_layer, hidden_states, (cos[kind], sin[kind]), near), sums), None

    hidden_states = call(module.embed_tokens, select_part(params, "embed_tokens"), torch.nn.Module.__call__, ids)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(lambda x: streams.project_state(connectors, x, mask, 0), hidden_states),
    )
    stacked = jnp.arange(len(kinds)), jnp.asarray(kinds), select_part(params, "layers.template")
    (hidden_states, sums), _ = jax.lax.scan(step, (hidden_states, zeros), stacked)
    hidden_states = call(module.norm, select_part(params, "norm"), torch.nn.Module.__call__, hidden_states)
    return streams.connect(connectors, add(sums, hidden_states, len(kinds)), mask)


def count_flops(config: Ltx2Config) -> int:
    """Count the operations of encoding a prompt (a multiply-add is two) on transformers' and diffusers' own modules."""
    ids = torch.ones(1, TEXT_TOKENS, dtype=torch.int32, device="meta")
    masks = dict.fromkeys(_KINDS)  # Without these, transformers would read the tokens' values to build masks.
    gemma = count(
        text_encoder(config).build,
        lambda module: module(inputs_embeds=module.embed_tokens(ids), attention_mask=masks, use_cache=False),
    )
    width = config.connectors["caption_channels"] * config.connectors["text_proj_in_factor"]
    states = torch.empty(1, TEXT_TOKENS, width, device="meta")
    return gemma + count(streams.connectors(config).build, lambda module: module(states, ids))


def _adapt(module: torch.nn.Module, mesh: Mesh) -> None:
    """Replace attention, and the rotary embedding by a table for each kind of layer, [2, L, 1, D/2]."""
    positions, used = torch.arange(TEXT_TOKENS)[None], set(module.config.layer_types)
    kinds = [kind if kind in used else _KINDS[0] for kind in _KINDS]
    tables = [module.rotary_emb(torch.empty(0), positions, kind) for kind in kinds]
    module.rotary_emb = torch.nn.Module()
    for name, layers in zip(("cos", "sin"), zip(*tables, strict=True), strict=True):
        halves = torch.cat(layers).chunk(2, dim=-1)[0]  # Each angle is there twice.
        module.rotary_emb.register_buffer(name, halves[:, :, None].contiguous(), persistent=False)
    for layer in module.layers:
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
    query, key, value = (
        projection(hidden_states).unflatten(2, heads)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    cos, sin = to_jax(position_embeddings)
    query, key = (rotate(to_jax(x), cos, sin) for x in (attention.q_norm(query), attention.k_norm(key)))
    attended = jax.nn.dot_product_attention(
        query, key, to_jax(value), mask=to_jax(attention_mask), scale=attention.scaling
    )
    return attention.o_proj(to_torch(attended).flatten(2)), None
