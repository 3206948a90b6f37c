"""Encodes a prompt for HunyuanVideo-1.5: all of it with Qwen2.5-VL, and text in quotation marks with ByT5.

The instructions before every prompt, and the rule for what is quoted, are diffusers': the model was trained with them.
"""

import inspect

import jax
import numpy as np
import torch
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as reference

from wan_tpu.families.hunyuan15.published import GLYPH_TOKENS, TEMPLATE_TOKENS, TEXT_TOKENS
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import Tokenizer, tokenize
from wan_tpu.runtime.bridge import Params, call

_INSTRUCTIONS: str = (
    inspect.signature(reference.HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
)


def tokenize_prompt(shared: Tokenizer, prompt: str) -> tuple[np.ndarray, np.ndarray, list[Cut]]:
    """Return ids and mask of a prompt in its chat, int32 [1, 1108], and the cut if the prompt is too long.

    Raises:
        CheckpointError: The tokenizer doesn't work.
    """
    length = TEMPLATE_TOKENS + TEXT_TOKENS
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    chat = reference.format_text_input([prompt], _INSTRUCTIONS)
    cuts = []
    with shared.lock() as tokenizer:
        token_count = len(tokenizer.apply_chat_template(chat, **options)["input_ids"][0])
        tokens = tokenizer.apply_chat_template(
            chat, **options, padding="max_length", max_length=length, truncation=True, return_tensors="np"
        )
        if token_count > length:
            end = tokenizer.decode(tokens["input_ids"][0, -9:], skip_special_tokens=True)
            cuts.append(Cut(token_count - TEMPLATE_TOKENS, TEXT_TOKENS, end))
        return *shared.to_arrays(tokens), cuts


def tokenize_glyphs(shared: Tokenizer, prompt: str) -> tuple[np.ndarray, np.ndarray, list[Cut]] | None:
    """Return ids and mask of a prompt's quoted text, int32 [1, 256], and its cut if any; None if there is no such text.

    Raises:
        CheckpointError: The tokenizer doesn't work.
    """
    texts = reference.extract_glyph_texts(prompt)
    return None if texts is None else tokenize(shared, texts, GLYPH_TOKENS, "quoted text")


def encode_prompt(module: torch.nn.Module, params: Params, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Return Qwen's embeddings of the prompt, [B, 1000, C], from its chat's ids and mask [B, 1108].

    They come from the last layer but two (`components.text_encoder`), without those of the instructions at the start.
    """

    def method(module: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return module(ids, mask, use_cache=False).last_hidden_state

    return call(module, params, method, ids, mask)[:, TEMPLATE_TOKENS:]


def encode_glyphs(module: torch.nn.Module, params: Params, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Return ByT5's embeddings of quoted text, [B, 256, C]."""

    def method(module: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return module(ids, mask.float()).last_hidden_state

    return call(module, params, method, ids, mask)
