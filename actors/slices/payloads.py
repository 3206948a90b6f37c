"""What crosses from stage to stage through Ray's object store: numpy arrays that are read where they lie.

The store hands numpy arrays of its own dtypes out without a copy, as read-only views of shared memory; an array of
bfloat16 is pickled instead and copied twice (Ray 2.60). So bfloat16 goes as a uint16 view with a tag. What `unpack`
returns are views of the store: read-only, and they keep the object there for as long as they live. On CPU
`jax.device_put` may alias them, so they must never be donated to a program; the stages copy what they put on devices.
"""

import dataclasses
from typing import get_args

import ml_dtypes
import numpy as np

from wan_tpu.data import DenoiseState, ImageCondition

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class TextEmbedding:
    """One prompt's embeddings, [1, L=512, C]; a request under guidance has two."""

    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class EncodedVideo:
    """A finished mp4, uint8 [bytes]."""

    mp4: np.ndarray


Value = TextEmbedding | ImageCondition | DenoiseState | EncodedVideo
KINDS = {kind.__name__: kind for kind in get_args(Value)}


@dataclasses.dataclass(frozen=True)
class Payload:
    """A stage value as the store keeps it.

    kind      the value's class; step  of a `DenoiseState`: how many are done, so that brokers needn't look inside
    arrays    by field; the terms of a solver's history are "history.0", ...
    bfloat16  which of them are bfloat16, held as uint16
    """

    kind: str
    arrays: dict[str, np.ndarray]
    bfloat16: frozenset[str] = frozenset()
    step: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def pack(value: Value) -> Payload:
    """Return a value as a payload; arrays are not copied."""
    arrays: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if isinstance(content, tuple):
            arrays |= {f"{field.name}.{i}": np.asarray(term) for i, term in enumerate(content)}
        elif content is not None and field.name != "step":
            arrays[field.name] = np.asarray(content)
    tagged = frozenset(name for name, array in arrays.items() if array.dtype == BFLOAT16)
    plain = {name: array.view(np.uint16) if name in tagged else array for name, array in arrays.items()}
    return Payload(type(value).__name__, plain, tagged, getattr(value, "step", None))


def unpack(payload: Payload) -> Value:
    """Return the value of a payload, its arrays views of the payload's.

    Raises `TypeError` for anything that `pack` didn't make.
    """
    if not isinstance(payload, Payload) or payload.kind not in KINDS:
        found = payload.kind if isinstance(payload, Payload) else type(payload).__name__
        raise TypeError(f"{found} is no payload of a stage; pack() makes them of {', '.join(KINDS)}")
    arrays = {n: array.view(BFLOAT16) if n in payload.bfloat16 else array for n, array in payload.arrays.items()}
    if payload.kind == DenoiseState.__name__:
        terms = tuple(arrays[f"history.{i}"] for i in range(len(arrays) - 1))
        return DenoiseState(arrays["latents"], terms, payload.step or 0)
    return KINDS[payload.kind](**arrays)


def mp4(content: bytes) -> EncodedVideo:
    """Return the bytes of an mp4 as a value; not copied."""
    return EncodedVideo(np.frombuffer(content, np.uint8))
