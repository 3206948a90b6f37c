"""Payloads from stage to stage through Ray's object store: numpy arrays that are read in place.

The store returns arrays of numpy's own dtypes without a copy, as read-only views of shared memory; an array of
bfloat16 is pickled instead and copied twice (Ray 2.60). So bfloat16 travels as a uint16 view with a tag. `unpack`
returns views of the store: read-only, and they keep the object there for as long as they live. On CPU
`jax.device_put` may alias them, so they must never be donated to a program; the stages copy what they put on devices.
"""

from dataclasses import dataclass
from typing import get_args

import ml_dtypes
import numpy as np

from wan_tpu.data import Arrays, DenoiseState, ImageCondition, flatten, rebuild

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class TextEmbedding:
    """The embeddings of one prompt by the encoders' names, each [1, ...]. A request with guidance has two of these."""

    values: Arrays


@dataclass(frozen=True)
class EncodedVideo:
    """A finished video."""

    mp4: np.ndarray  # The file, uint8 [bytes].
    last_frame: np.ndarray | None = None  # The last frame before compression, uint8 [H, W, 3], if it is known.
    tail: np.ndarray | None = None  # Its end (`wan_tpu.tail.Tail.dump`), uint8 [bytes], if the request keeps it.


Value = TextEmbedding | ImageCondition | DenoiseState | EncodedVideo
KINDS = {kind.__name__: kind for kind in get_args(Value)}


@dataclass(frozen=True)
class Payload:
    """A stage's value in the form in which the object store holds it."""

    kind: str  # The name of the value's class.
    arrays: dict[str, np.ndarray]  # The value's arrays by field, as `wan_tpu.data.flatten` names them.
    bfloat16: frozenset[str] = frozenset()  # Names of the arrays that are bfloat16, held as uint16.
    step: int | None = None  # How many steps of a `DenoiseState` are done, so that brokers needn't unpack it.

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def pack(value: Value) -> Payload:
    """Return a value as a payload; arrays are not copied."""
    arrays = flatten(value)
    step = arrays.pop("step", None)
    bfloat16 = frozenset(name for name, array in arrays.items() if array.dtype == BFLOAT16)
    plain = {name: array.view(np.uint16) if name in bfloat16 else array for name, array in arrays.items()}
    return Payload(type(value).__name__, plain, bfloat16, None if step is None else int(step))


def unpack(payload: Payload) -> Value:
    """Return the value of a payload; its arrays are views of the payload's.

    Raises:
        TypeError: `pack` didn't return this payload.
    """
    if not isinstance(payload, Payload) or payload.kind not in KINDS:
        kind = payload.kind if isinstance(payload, Payload) else type(payload).__name__
        raise TypeError(f"{kind} isn't a payload of a stage; pack() accepts {', '.join(KINDS)}")
    arrays = {n: array.view(BFLOAT16) if n in payload.bfloat16 else array for n, array in payload.arrays.items()}
    if payload.step is not None:
        arrays["step"] = np.asarray(payload.step)
    return rebuild(KINDS[payload.kind], arrays)


def mp4(content: bytes, last_frame: np.ndarray | None = None, tail: bytes | None = None) -> EncodedVideo:
    """Return the bytes of an mp4, and of its end, as a value, without copies."""
    ending = None if tail is None else np.frombuffer(tail, np.uint8)
    return EncodedVideo(np.frombuffer(content, np.uint8), last_frame, ending)
