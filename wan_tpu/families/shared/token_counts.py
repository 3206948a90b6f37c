"""How many tokens a text has, counted without transformers and torch, and what is cut of one that is too long."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import tokenizers

from wan_tpu.errors import InvalidRequest

_MOST_TEXTS = 64  # Counted texts that are kept, because a request is planned more than once.
_EXCERPT = 8  # Tokens before the cut that a warning repeats.


class Cut(NamedTuple):
    """A text that is longer than the model reads."""

    tokens: int
    read: int  # How many the model reads.
    end: str  # The last words that are read.
    part: str = ""  # What of the field the text is, such as "quoted text"; empty if it is all of it.

    def describe(self, field: str) -> str:
        """Return the warning that a field was cut."""
        return f"{self._name(field)}, the model reads {self.read}: cut after «… {self.end.strip()}»"

    def refuse(self, field: str) -> InvalidRequest:
        """Return the error for a field that may not be cut."""
        return InvalidRequest(
            f"{self._name(field)}; allowed: at most {self.read}. Shorten it, or set truncate_prompt to have it cut "
            f"after «… {self.end.strip()}»",
            field,
        )

    def _name(self, field: str) -> str:
        return f"{f'{self.part} of {field}' if self.part else field} is {self.tokens} tokens long"


class TokenCount(NamedTuple):
    """The length of a text."""

    tokens: int
    cut: Cut | None  # What is cut of it, if it has more than there is room for.


@functools.lru_cache(_MOST_TEXTS)
def count_tokens(folder: str | None, text: str, room: int) -> TokenCount | None:
    """Count a text's tokens, without special ones around it.

    Args:
        room: How many tokens the model reads.

    Returns:
        None if this process can't read the tokenizer. The text encoder's process says why.
    """
    if folder is None:
        return None
    try:
        tokenizer = _open(folder)
    except Exception:  # The tokenizers package raises nothing more specific.
        return None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) <= room:
        return TokenCount(len(ids), None)
    end = tokenizer.decode(ids[room - _EXCERPT : room], skip_special_tokens=False)
    return TokenCount(len(ids), Cut(len(ids), room, end))


@functools.lru_cache(2)
def _open(folder: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # As in transformers, a model may have further special tokens, in its other file.
    added = json.loads(Path(folder, "tokenizer_config.json").read_text()).get("added_tokens_decoder", {})
    tokenizer.add_tokens([tokenizers.AddedToken(**token) for token in added.values()])
    return tokenizer
