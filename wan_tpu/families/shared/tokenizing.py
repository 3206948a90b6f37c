"""Turns prompts into token ids of a fixed length."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.sources.disk import explain_unusable

_FEWEST_WORDS = 100  # The smallest plausible vocabulary: even a tokenizer of bytes has 256 words.


class Tokenizer:
    """A text encoder's tokenizer, which is read on first use, taking up to a second, and kept."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """Remember where the tokenizer is; `vocabulary` is the number of tokens that the text encoder knows."""
        self._folder, self._vocabulary = folder, vocabulary
        self._tokenizer: Any = None
        self._lock = threading.Lock()  # A call's padding and length stay settings of the tokenizer until the next call.

    @contextlib.contextmanager
    def lock(self) -> Iterator[Any]:
        """Lend transformers' tokenizer to one thread at a time.

        Raises:
            CheckpointError: The folder has no working tokenizer.
            Unavailable: The disk or the machine fails.
        """
        try:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = self._read()
                yield self._tokenizer
        except MemoryError:  # This is the machine's error, not the checkpoint's.
            raise
        except Exception as error:
            # The tokenizers package raises bare Exception, for damaged files as well as for a failing disk.
            failed_to_load = self._tokenizer is None
            raise explain_unusable(error, self._folder, "tokenizer", read_again=failed_to_load) from error

    def to_arrays(self, tokens: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask of tokens, both int32 [1, L].

        Raises:
            ValueError: The text encoder has no embedding of a token. JAX would silently take its last one.
        """
        ids, mask = (np.asarray(tokens[name]).astype(np.int32) for name in ("input_ids", "attention_mask"))
        highest = int(np.max(ids))
        if highest >= self._vocabulary:
            raise ValueError(f"it has token {highest}, but the text encoder's vocabulary has {self._vocabulary}")
        return ids, mask

    def _read(self) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(self._folder.resolve()))
        # If the file is missing, transformers returns a tokenizer without words. A tokenizer may have fewer words than
        # the encoder knows.
        if (words := len(tokenizer) - len(tokenizer.get_added_vocab())) < _FEWEST_WORDS:
            raise ValueError(f"it has only {words} words, but the text encoder's vocabulary has {self._vocabulary}")
        return tokenizer


def tokenize(shared: Tokenizer, prompt: str, length: int, part: str = "") -> tuple[np.ndarray, np.ndarray, list[Cut]]:
    """Return token ids and mask, both int32 [1, length], and the cut if the text is too long.

    Args:
        prompt: The text.
        length: Number of tokens, padding included.
        part: What of the prompt the text is, if it isn't all of it.

    Raises:
        CheckpointError: The tokenizer doesn't work.
    """
    settings = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "np"}
    cuts = []
    with shared.lock() as tokenizer:
        tokens = tokenizer([prompt], **settings)
        token_count = len(tokenizer(prompt, verbose=False)["input_ids"])
        if token_count > length:
            end = tokenizer.decode(tokens["input_ids"][0, -9:-1], skip_special_tokens=True)
            cuts.append(Cut(token_count, length, end, part))
        return *shared.to_arrays(tokens), cuts
