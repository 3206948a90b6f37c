"""Locate the tensors of a safetensors file by its header alone.

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
# The first bytes of files that people often have instead of weights by mistake, and the remedy. `_OTHER_FORMATS` are
# refused only where safetensors are expected.
_STAND_INS = {
    b"version https://git-lfs": "a pointer of Git LFS; `git lfs pull`, or `hf download`, fetches the file itself",
    b"<!doctype": "a web page; where it was downloaded from, a login may be wanted",
    b"<html": "a web page; where it was downloaded from, a login may be wanted",
    b"\x1f\x8b": "compressed with gzip; decompress it (gunzip), and upload it without Content-Encoding: gzip (without "
    "--gzip-local of gcloud storage cp), which can't be read in ranges",
}
_OTHER_FORMATS = {
    b"pk\x03\x04": "an archive, as torch.save writes it; save its tensors with safetensors.torch.save_file",
    b"gguf": "a GGUF file; give the same model in bfloat16, float16 or float32, as safetensors",
}
_LENGTH_BYTES = 8  # Size of the number at the start of a file, which is the length of its header.
_MAX_DIMENSIONS = 64  # Dimensions that torch and numpy allow a tensor.
_MAX_HEADER_BYTES = 100_000_000  # The longest header that safetensors allows.


class Stored(NamedTuple):
    """The place of one tensor: its file's path or address, the offset of its first byte, its dtype and its shape."""

    file: str
    offset: int
    kind: torch.dtype
    shape: tuple[int, ...]


def read_metadata(file: WeightFile) -> dict[str, str]:
    """Return the metadata in the header of a file that `locate_tensors` has accepted."""
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    metadata = json.loads(file.read(_LENGTH_BYTES, _LENGTH_BYTES + length)).get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def locate_tensors(file: WeightFile) -> dict[str, Stored]:
    """Return where the tensors of a file are, by name; raises `CheckpointError` if it is damaged or truncated."""
    try:
        length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        if length > _MAX_HEADER_BYTES:
            raise ValueError("it isn't in the format of safetensors")
        if not 0 < length <= file.size - _LENGTH_BYTES:
            raise ValueError(f"its header would have {length} bytes, but the file has {file.size}")
        header = json.loads(file.read(_LENGTH_BYTES, start))
        header.pop("__metadata__", None)
        tensors = {name: _locate(file, start, **fields) for name, fields in header.items()}
        _check_offsets(sorted(tuple(fields["data_offsets"]) for fields in header.values()), file.size - start)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        refuse_other_content(file, _STAND_INS | _OTHER_FORMATS)
        raise CheckpointError(f"{file.address} is damaged or cut off ({error}); fetch it again") from None
    return tensors


def refuse_other_content(file: WeightFile, contents: Mapping[bytes, str] = _STAND_INS) -> None:
    """Raise `CheckpointError` for a file that doesn't hold weights, despite its name: fetching it again won't help."""
    beginning = file.read(0, min(file.size, 64)).lstrip().lower() if file.size else b""
    for start, advice in contents.items():
        if beginning.startswith(start):
            raise CheckpointError(f"{file.address} is {advice}")


def _check_offsets(spans: list[tuple[int, ...]], size: int) -> None:
    """Raise `ValueError` unless the tensors fill a file's data: each begins where the one before it ends.

    Args:
        spans: For each tensor, in order, its first byte and the byte after its last.
        size: Bytes of data.
    """
    end = 0
    for first, last in spans:
        if first != end:
            raise ValueError(f"its tensors {'overlap' if first < end else 'leave a hole'} at byte {min(first, end)}")
        end = last
    if end != size:
        raise ValueError(f"it has {size} bytes of tensors, but its header says {end}")


def _locate(file: WeightFile, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Stored:
    first, last = data_offsets
    if dtype not in KINDS:
        raise CheckpointError(
            f"{file.address} has a tensor of {dtype}; supported: {', '.join(KINDS)}; give a file that isn't quantised"
        )
    stored = Stored(file.address, start + first, KINDS[dtype], tuple(map(int, shape)))
    if len(stored.shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(stored.shape)} dimensions; allowed: at most {_MAX_DIMENSIONS}")
    if min(stored.shape, default=0) < 0 or last - first != math.prod(stored.shape) * stored.kind.itemsize:
        raise ValueError(f"a tensor of {shape} {dtype} has {last - first} bytes")
    return stored
