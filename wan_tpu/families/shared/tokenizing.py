"""A prompt as token ids of one length."""

from pathlib import Path

import numpy as np
import transformers

from wan_tpu.errors import CheckpointError


def tokenized(
    folder: Path, prompt: str, length: int, vocabulary: int, name: str = "the prompt"
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return token ids and mask, both int32 [1, length], and a warning if the prompt was cut.

    folder      of the tokenizer; raises `CheckpointError` where there is none that works
    vocabulary  tokens that the text encoder knows: transformers makes a tokenizer of no words where its file is missing
    name        of what is tokenized, for the warning
    """
    settings = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "np"}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder.resolve()))
        if 2 * len(tokenizer) < vocabulary:
            raise ValueError(f"{len(tokenizer)} tokens, of the {vocabulary} that the text encoder knows")
        tokens = tokenizer([prompt], **settings)
    except Exception as error:  # tokenizers raises bare Exception for damaged files
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(f"{folder} holds no working tokenizer ({reason}); fetch it again") from error
    warnings = []
    whole = len(tokenizer(prompt, verbose=False)["input_ids"])
    if whole > length:
        end = tokenizer.decode(tokens["input_ids"][0, -9:-1], skip_special_tokens=True)
        warnings.append(cut(name, whole, length, end))
    return tokens["input_ids"].astype(np.int32), tokens["attention_mask"].astype(np.int32), warnings


def cut(name: str, tokens: int, read: int, end: str) -> str:
    """Return the warning that something was cut; end: the last words that are read."""
    return f"{name} is {tokens} tokens long, the model reads {read}: cut after «… {end.strip()}»"
