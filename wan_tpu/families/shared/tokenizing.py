"""A prompt as token ids of one length."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from wan_tpu.errors import CheckpointError

_FEWEST_WORDS = 100  # Even a tokenizer of bytes has 256.


class Tokenizer:
    """A text encoder's tokenizer: read when it is first used, which takes up to a second, and kept."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """vocabulary: tokens that the text encoder knows."""
        self._folder, self._vocabulary = folder, vocabulary
        self._tokenizer: Any = None
        self._lock = threading.Lock()  # One call's padding and length are settings of the tokenizer until the next.

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        """Give transformers' tokenizer to one thread at a time; raises `CheckpointError` where none works."""
        try:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = self._read()
                yield self._tokenizer
        except Exception as error:  # tokenizers raises bare Exception for damaged files
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise CheckpointError(f"{self._folder} holds no working tokenizer ({reason}); fetch it again") from error

    def arrays(self, tokens: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask of tokens, both int32 [1, L].

        Raises `ValueError` for one that the text encoder has no embedding of: JAX would take its last.
        """
        ids, mask = (np.asarray(tokens[name]).astype(np.int32) for name in ("input_ids", "attention_mask"))
        if ids.max() >= self._vocabulary:
            raise ValueError(f"it has token {ids.max()}, the text encoder knows {self._vocabulary}")
        return ids, mask

    def _read(self) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(self._folder.resolve()))
        # transformers makes a tokenizer of no words where its file is missing; one may have fewer than the encoder.
        if (words := len(tokenizer) - len(tokenizer.get_added_vocab())) < _FEWEST_WORDS:
            raise ValueError(f"{words} words, of the {self._vocabulary} that the text encoder knows")
        return tokenizer


def tokenized(
    kept: Tokenizer, prompt: str, length: int, name: str = "the prompt"
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return token ids and mask, both int32 [1, length], and a warning if the prompt was cut.

    name  of what is tokenized, for the warning. Raises `CheckpointError` as `Tokenizer.opened`
    """
    settings = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "np"}
    warnings = []
    with kept.opened() as tokenizer:
        tokens = tokenizer([prompt], **settings)
        whole = len(tokenizer(prompt, verbose=False)["input_ids"])
        if whole > length:
            end = tokenizer.decode(tokens["input_ids"][0, -9:-1], skip_special_tokens=True)
            warnings.append(cut(name, whole, length, end))
        return *kept.arrays(tokens), warnings


def cut(name: str, tokens: int, read: int, end: str) -> str:
    """Return the warning that something was cut; end: the last words that are read."""
    return f"{name} is {tokens} tokens long, the model reads {read}: cut after «… {end.strip()}»"
