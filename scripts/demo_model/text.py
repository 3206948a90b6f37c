"""The tokenizer, trained on the captions, and the text encoder.

Shapes: B sentences, L tokens, C channels.
"""

import math
import re
import string
from collections import Counter
from typing import Any

import torch
import transformers
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from . import sizes
from .captions import all_words, caption
from .scenes import draw_scene

_SENTENCES = 4000  # whose words are counted
_MULTIPLE = 32  # of tokens: longer than any sentence, so that all batches have one shape
_RARE = -12.0  # log probability of a letter: below that of any word


def train_tokenizer(seed: int) -> transformers.T5TokenizerFast:
    """Return a T5 tokenizer (unigram) of the training set's words; any other word is spelt in letters.

    The words are counted, not found by expectation maximisation: tokenizers' trainer, on a grammar of 60 words, keeps
    letters and drops words.
    """
    counts = Counter(all_words())  # each word of the grammar is known, whatever was drawn
    for i in range(_SENTENCES):
        counts.update(re.findall(r"\w+|,", caption(draw_scene(seed, i, held_out=False))))
    total = sum(counts.values())
    words = {word if word == "," else f"▁{word}": math.log(n / total) for word, n in counts.most_common()}
    letters = dict.fromkeys(["▁", *string.ascii_letters, *string.digits, *string.punctuation], _RARE)
    vocabulary = [(name, 0.0) for name in ("<pad>", "</s>", "<unk>")] + list((letters | words).items())
    return transformers.T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=sizes.TEXT_TOKENS)


def new_text_encoder(vocabulary: int) -> transformers.UMT5EncoderModel:
    """Return an untrained encoder for a tokenizer of `vocabulary` pieces."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**(sizes.TEXT_ENCODER | {"vocab_size": vocabulary})))


class PaddedText(WanAttnProcessor):
    """Cross-attention that computes 512 tokens of text from a few, exactly.

    Pipelines pad embeddings with zeros to 512 tokens and mask none of them, so all of the padding has one key. Training
    gives one row of zeros in place of all that lie beyond the longest sentence of a batch: with log(their number) added
    to its score it takes the same part of the softmax. Half of a step's time would go into that padding otherwise.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """Attend as diffusers does; text of less than 512 tokens is taken for padded as above."""
        if encoder_hidden_states is not None and encoder_hidden_states.shape[1] < sizes.TEXT_TOKENS:
            length = encoder_hidden_states.shape[1]
            attention_mask = hidden_states.new_zeros(1, 1, 1, length)
            attention_mask[..., -1] = math.log(sizes.TEXT_TOKENS - length + 1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)


def embed(
    encoder: transformers.UMT5EncoderModel, tokenizer: transformers.T5TokenizerFast, sentences: list[str]
) -> torch.Tensor:
    """Return embeddings [B, L + 1, C], zero behind each sentence, the last row for all padding (`PaddedText`)."""
    tokens = tokenizer(sentences, padding=True, pad_to_multiple_of=_MULTIPLE, return_tensors="pt").to(encoder.device)
    hidden = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    return torch.nn.functional.pad(hidden * tokens.attention_mask[..., None], (0, 0, 0, 1))
