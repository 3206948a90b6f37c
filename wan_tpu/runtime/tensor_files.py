"""Which tensors a safetensors file holds, and where, by its header alone.

Source: github.com/huggingface/safetensors, "Format".
"""

import json
import math
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
_LENGTH = 8  # bytes of the number that says how long the header is
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
        end = max((start + fields["data_offsets"][1] for fields in header.values()), default=start)
        if end != file.size:
            raise ValueError(f"it has {file.size} bytes, its header says {end}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file.address} is damaged or cut off ({error}); fetch it again") from None
    return found


def _stored(file: WeightFile, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Stored:
    first, last = data_offsets
    if dtype not in KINDS:
        raise ValueError(f"a tensor is of {dtype}; read are {', '.join(KINDS)}")
    stored = Stored(file.address, start + first, KINDS[dtype], tuple(map(int, shape)))
    if min(stored.shape, default=0) < 0 or last - first != math.prod(stored.shape) * stored.kind.itemsize:
        raise ValueError(f"a tensor of {shape} {dtype} has {last - first} bytes")
    return stored
