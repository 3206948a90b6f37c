"""What HunyuanVideo-1.5 reads of a prompt: all of it through Qwen2.5-VL, and what stands in quotes through ByT5.

The instructions before every prompt, and what counts as quoted, are diffusers' own: the model was trained with them.
"""

import inspect

import jax
import numpy as np
import torch
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as reference

from wan_tpu.families.hunyuan15.presets import GLYPH_TOKENS, TEMPLATE_TOKENS, TEXT_TOKENS
from wan_tpu.families.shared.tokenizing import Tokenizer, cut, tokenized
from wan_tpu.runtime.bridge import Params, call

_INSTRUCTIONS: str = (
    inspect.signature(reference.HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
)


def prompt_tokens(kept: Tokenizer, prompt: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return ids and mask of a prompt in its chat, int32 [1, 1108], and a warning if the prompt was cut.

    Raises `CheckpointError` as `Tokenizer.opened`.
    """
    length = TEMPLATE_TOKENS + TEXT_TOKENS
    given = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    chat = reference.format_text_input([prompt], _INSTRUCTIONS)
    warnings = []
    with kept.opened() as tokenizer:
        whole = len(tokenizer.apply_chat_template(chat, **given)["input_ids"][0])
        tokens = tokenizer.apply_chat_template(
            chat, **given, padding="max_length", max_length=length, truncation=True, return_tensors="np"
        )
        if whole > length:
            end = tokenizer.decode(tokens["input_ids"][0, -9:], skip_special_tokens=True)
            warnings.append(cut("the prompt", whole - TEMPLATE_TOKENS, TEXT_TOKENS, end))
        return *kept.arrays(tokens), warnings


def glyph_tokens(kept: Tokenizer, prompt: str) -> tuple[np.ndarray, np.ndarray, list[str]] | None:
    """Return ids and mask of what a prompt quotes, int32 [1, 256], and a warning if it was cut; None without quotes."""
    quoted = reference.extract_glyph_texts(prompt)
    return None if quoted is None else tokenized(kept, quoted, GLYPH_TOKENS, "quoted text")


def encode_prompt(module: torch.nn.Module, params: Params, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Return Qwen's embeddings of the prompt, [B, 1000, C], from its chat's ids and mask [B, 1108].

    They are those of the last layer but two (`components.text_encoder`); those of the instructions' start are left out.
    """

    def method(module: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return module(ids, mask, use_cache=False).last_hidden_state

    return call(module, params, method, ids, mask)[:, TEMPLATE_TOKENS:]


def encode_glyphs(module: torch.nn.Module, params: Params, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Return ByT5's embeddings of quoted text, [B, 256, C]."""

    def method(module: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return module(ids, mask.float()).last_hidden_state

    return call(module, params, method, ids, mask)
