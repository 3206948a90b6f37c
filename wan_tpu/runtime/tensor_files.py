"""Which tensors a safetensors file holds, and where, by its header alone.

Source: github.com/huggingface/safetensors, "Format".
"""

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from wan_tpu.checkpoint import WeightFile
from wan_tpu.errors import CheckpointError

KINDS: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# How files begin that are found in place of weights, and what to do about them; below, only in place of safetensors.
_STAND_INS = {
    b"version https://git-lfs": "a pointer of Git LFS; `git lfs pull`, or `hf download`, fetches the file itself",
    b"<!doctype": "a web page; where it was downloaded from, a login may be wanted",
    b"<html": "a web page; where it was downloaded from, a login may be wanted",
}
_OTHER_FORMATS = {
    b"pk\x03\x04": "an archive, as torch.save writes it; save its tensors with safetensors.torch.save_file",
    b"gguf": "a GGUF file; give the same model in bfloat16, float16 or float32, as safetensors",
}
_LENGTH = 8  # bytes of the number that says how long the header is
_MOST_DIMENSIONS = 64  # Of a tensor, as torch and numpy have them.
_MOST = 100_000_000  # bytes that a header may have


class Stored(NamedTuple):
    """Where one tensor lies: a file's path or address, the offset of its first byte, its dtype and shape there."""

    file: str
    offset: int
    kind: torch.dtype
    shape: tuple[int, ...]


def metadata(file: WeightFile) -> dict[str, str]:
    """Return what a file's header says beside its tensors, of a file whose `tensors` were read."""
    length = int.from_bytes(file.read(0, _LENGTH), "little")
    found = json.loads(file.read(_LENGTH, _LENGTH + length)).get("__metadata__")
    return found if isinstance(found, dict) else {}


def tensors(file: WeightFile) -> dict[str, Stored]:
    """Return the tensors of a file by name. Raises `CheckpointError` when it is damaged or cut off."""
    try:
        length = int.from_bytes(file.read(0, _LENGTH), "little")
        start = _LENGTH + length
        if not 0 < length <= min(_MOST, file.size - _LENGTH):
            raise ValueError(f"its header would have {length} bytes of {file.size}")
        header = json.loads(file.read(_LENGTH, start))
        header.pop("__metadata__", None)
        found = {name: _stored(file, start, **fields) for name, fields in header.items()}
        _check_offsets(sorted(tuple(fields["data_offsets"]) for fields in header.values()), file.size - start)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        refuse_other_content(file, _STAND_INS | _OTHER_FORMATS)
        raise CheckpointError(f"{file.address} is damaged or cut off ({error}); fetch it again") from None
    return found


def refuse_other_content(file: WeightFile, contents: Mapping[bytes, str] = _STAND_INS) -> None:
    """Raise `CheckpointError` for a file that fetching again would not help: something else has the name of weights."""
    begins = file.read(0, min(file.size, 64)).lstrip().lower() if file.size else b""
    for start, advice in contents.items():
        if begins.startswith(start):
            raise CheckpointError(f"{file.address} is {advice}")


def _check_offsets(spans: list[tuple[int, ...]], size: int) -> None:
    """Raise `ValueError` unless the tensors fill a file's data: each begins where the one before it ends.

    Args:
        spans: First byte and the one after the last of each tensor, in order.
        size: Bytes of data.
    """
    end = 0
    for first, last in spans:
        if first != end:
            raise ValueError(f"its tensors {'overlap' if first < end else 'leave a hole'} at byte {min(first, end)}")
        end = last
    if end != size:
        raise ValueError(f"it has {size} bytes of tensors, its header says {end}")


def _stored(file: WeightFile, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Stored:
    first, last = data_offsets
    if dtype not in KINDS:
        raise CheckpointError(
            f"{file.address} has a tensor of {dtype}; read are {', '.join(KINDS)}: give one that wasn't quantised"
        )
    stored = Stored(file.address, start + first, KINDS[dtype], tuple(map(int, shape)))
    if len(stored.shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(stored.shape)} dimensions; read are {_MOST_DIMENSIONS}")
    if min(stored.shape, default=0) < 0 or last - first != math.prod(stored.shape) * stored.kind.itemsize:
        raise ValueError(f"a tensor of {shape} {dtype} has {last - first} bytes")
    return stored
