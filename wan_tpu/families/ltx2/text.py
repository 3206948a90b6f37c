"""Encodes a prompt for LTX-2: Gemma reads it, and the connectors turn all of its hidden states into two texts.

Shapes: B batch, L tokens, C channels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from wan_tpu.families.ltx2 import connectors as streams
from wan_tpu.families.ltx2 import gemma
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.ltx2.connectors import TEXT_TOKENS
from wan_tpu.families.shared.flop_count import count
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.runtime.bridge import call, select_part
from wan_tpu.runtime.components import Loaded

Sums = dict[str, jax.Array]


def tokenize_prompt(
    shared: Tokenizer, prompt: str, *, begins: bool = False
) -> tuple[np.ndarray, np.ndarray, list[Cut]]:
    """Return ids and mask of a prompt, int32 [1, 1024], padded on the left, and the cut if the prompt is too long.

    Args:
        shared: The tokenizer.
        prompt: The prompt.
        begins: Whether <bos> comes first even if the tokenizer doesn't put it there.

    Raises:
        CheckpointError: The tokenizer doesn't work.
    """
    prompt, cuts = prompt.strip(), []
    with shared.lock() as tokenizer:
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        ids = tokenizer(prompt, verbose=False)["input_ids"]
        if begins and ids[:1] != [tokenizer.bos_token_id]:
            ids = [tokenizer.bos_token_id, *ids]
        if len(ids) > TEXT_TOKENS:
            end = tokenizer.decode(ids[TEXT_TOKENS - 8 : TEXT_TOKENS], skip_special_tokens=True)
            cuts.append(Cut(len(ids), TEXT_TOKENS, end))
        padding = {"padding": "max_length", "max_length": TEXT_TOKENS, "return_tensors": "np"}
        return *shared.to_arrays(tokenizer.pad({"input_ids": [ids[:TEXT_TOKENS]]}, **padding)), cuts


def encode_prompt(encoder: Loaded, connectors: Loaded, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Return the text that the transformer reads: "text" for video and "audio_text", [B, 1024, O].

    The connectors' projections are summed in float32 while Gemma's layers run.

    Args:
        encoder: From `gemma.text_encoder`.
        connectors: From `connectors.connectors`.
        ids, mask: From `tokenize_prompt`, [B, 1024].
    """
    module, params = encoder.module, encoder.params
    visible = jnp.tri(TEXT_TOKENS, dtype=bool) & (mask[:, None, None] > 0)  # [B, 1, L, L]

    def add(sums: Sums, hidden_states: jax.Array, number: int | jax.Array) -> Sums:
        return jax.tree.map(jnp.add, sums, streams.project_state(connectors, hidden_states, mask, number))

    hidden_states = call(module.embed_tokens, select_part(params, "embed_tokens"), torch.nn.Module.__call__, ids)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(lambda x: streams.project_state(connectors, x, mask, 0), hidden_states),
    )
    hidden_states, sums = gemma.run_layers(encoder, visible, (hidden_states, zeros), add)
    hidden_states = call(module.norm, select_part(params, "norm"), torch.nn.Module.__call__, hidden_states)
    return streams.connect(connectors, add(sums, hidden_states, module.config.num_hidden_layers), mask)


def count_flops(config: Ltx2Config) -> int:
    """Count the operations of encoding a prompt (a multiply-add is two) on transformers' and diffusers' own modules."""
    ids = torch.ones(1, TEXT_TOKENS, dtype=torch.int32, device="meta")
    # Without masks, transformers would read the tokens' values to build them.
    masks = dict.fromkeys((gemma.WINDOW, gemma.FULL))
    operations = count(
        functools.partial(gemma.build, config.text_encoder),
        lambda module: module(inputs_embeds=module.embed_tokens(ids), attention_mask=masks, use_cache=False),
    )
    width = config.connectors["caption_channels"] * config.connectors["text_proj_in_factor"]
    states = torch.empty(1, TEXT_TOKENS, width, device="meta")
    return operations + count(streams.connectors(config).build, lambda module: module(states, ids))
