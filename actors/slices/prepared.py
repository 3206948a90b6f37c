"""Requests whose inputs lie on a host's devices, from one call of the host to the next."""

import dataclasses
from typing import TypeVar

import jax
import numpy as np

from actors.slices.payloads import Payload, TextEmbedding, unpack
from wan_tpu import stages
from wan_tpu.data import DenoiseState, ImageCondition
from wan_tpu.errors import WanTpuError
from wan_tpu.plan import Expert, RequestPlan
from wan_tpu.request import ResolvedRequest


class OutOfOrder(WanTpuError):
    """A host was called in an impossible order: its driver's or leader's mistake, never a request's."""


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A request whose image is to be encoded."""

    request: ResolvedRequest
    inputs: stages.ImageInputs


@dataclasses.dataclass
class Denoising:
    """A request at the experts: inputs on the devices, and the run once it has begun.

    Attributes:
        plan: The request's plan, with its adapters in host memory.
        inputs: By expert: one without guidance takes the prompt alone, and latents of another size other positions.
        state: The state to begin from.
        run: The expert that runs now, or None between two experts.
    """

    plan: RequestPlan
    inputs: dict[Expert, stages.ExpertInputs]
    state: DenoiseState
    run: stages.ExpertRun | None = None

    @property
    def reached(self) -> DenoiseState:
        """The state after the last step."""
        run = self.run  # Read once, because the other thread may end it meanwhile.
        return self.state if run is None else run.state

    @property
    def resumable(self) -> DenoiseState:
        """The latest state that can be copied out while the next step runs."""
        run = self.run  # Read once, because the other thread may end it meanwhile.
        return self.state if run is None else run.resumable


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A request whose latents are to be decoded; `audio` are the sound's, None where the video has none."""

    request: ResolvedRequest
    frames: list[jax.Array]
    audio: np.ndarray | None


_Value = TypeVar("_Value", TextEmbedding, ImageCondition, DenoiseState)
_Work = TypeVar("_Work", Encoding, Denoising, Decoding)
_PREPARED_BY = {Encoding: "prepare_encode", Denoising: "prepare_denoise", Decoding: "prepare_decode"}


class PreparedRequests:
    """The prepared requests of one host, by key."""

    def __init__(self) -> None:
        self._work: dict[str, Encoding | Denoising | Decoding] = {}

    def put(self, key: str, work: Encoding | Denoising | Decoding) -> None:
        """Hold a request's work, in place of any that has the same key."""
        self._work[key] = work

    def get(self, key: str, kind: type[_Work]) -> _Work:
        """Return a request's work; raise `OutOfOrder` unless it is of that kind."""
        work = self._work.get(key)
        if not isinstance(work, kind):
            raise OutOfOrder(f"request {key} is not ready for this; call {_PREPARED_BY[kind]} first")
        return work

    def take(self, key: str, kind: type[_Work]) -> _Work:
        """Return a request's work, as `get`, and release it."""
        work = self.get(key, kind)
        del self._work[key]
        return work

    def drop(self, key: str) -> None:
        """Release a request, if it is here."""
        self._work.pop(key, None)

    def list_keys(self) -> list[str]:
        """Return the keys of all requests here."""
        return sorted(self._work)


def unpack_as(kind: type[_Value], payload: Payload | None) -> _Value | None:
    """Return the value of a payload, or None for None; raise `OutOfOrder` when it is of another kind."""
    if payload is None:
        return None
    value = unpack(payload)
    if not isinstance(value, kind):
        raise OutOfOrder(f"a {payload.kind} was given where a {kind.__name__} belongs; give that stage's payload")
    return value
