"""Requests whose inputs lie on a host's devices, from one call of the host to the next."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from actors.slices.payloads import Payload, TextEmbedding, unpack
from wan_tpu import stages
from wan_tpu.data import DenoiseState, ImageCondition
from wan_tpu.errors import WanTpuError
from wan_tpu.families.model import Model
from wan_tpu.media.mp4 import Mp4
from wan_tpu.plan import AUDIO, VIDEO, Expert, RequestPlan
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.health import ColourRange
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stages.chunks import chunk_of


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
    def last_state(self) -> DenoiseState:
        """The state after the last step."""
        run = self.run  # Read once, because the other thread may end it meanwhile.
        return self.state if run is None else run.state

    @property
    def resumable(self) -> DenoiseState:
        """The latest state that can be copied out while the next step runs."""
        run = self.run  # Read once, because the other thread may end it meanwhile.
        return self.state if run is None else run.resumable

    def copy_chunk(self, chunk: int) -> DenoiseState:
        """Return the latents of a chunk of the video, on the host; raise `OutOfOrder` unless it is denoised."""
        state, stop = self.last_state, self.plan.chunk_stops[chunk]
        if state.step < stop:
            raise OutOfOrder(f"chunk {chunk} is denoised after {stop} steps, and {state.step} are done")
        return DenoiseState(chunk_of(self.plan, state, chunk), step=stop)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A request whose latents are to be decoded.

    Attributes:
        request: The request.
        frames: The latents, as `stages.decoder_inputs` returns them.
        audio: The sound's latents; None where the video has none.
        chunk: Which chunk of the video they are, where it is decoded chunk after chunk.
        is_last: Whether the video ends with them.
    """

    request: ResolvedRequest
    frames: list[jax.Array]
    audio: np.ndarray | None
    chunk: int = 0
    is_last: bool = True


@dataclasses.dataclass
class OpenVideo:
    """A video that is decoded: its mp4, and everything that is followed over all of its chunks.

    Attributes:
        mp4: The mp4.
        colours: The colours of all frames so far.
        chunks: How many chunks have been decoded.
    """

    mp4: Mp4
    colours: ColourRange = dataclasses.field(default_factory=ColourRange)
    chunks: int = 0


class OpenVideos:
    """The videos of one host that some chunks are missing of, by the keys of their requests."""

    def __init__(self) -> None:
        self._videos: dict[str, OpenVideo] = {}

    @contextlib.contextmanager
    def add_to(self, key: str, work: Decoding, on_fragment: Callable[[bytes], None] | None) -> Iterator[OpenVideo]:
        """Yield a request's video for the block, which decodes one chunk; it stays open unless that is the last one.

        Args:
            key: The request's key.
            work: The chunk.
            on_fragment: Called with fragments of the video; the first chunk decides.
        """
        request, video = work.request, self._videos.pop(key, None)
        if video is None:
            video = OpenVideo(Mp4(request.fps, on_fragment, hidden_frames=request.hidden_frames))
        with contextlib.ExitStack() as stack:
            stack.enter_context(video.mp4)
            if video.chunks != work.chunk:
                raise OutOfOrder(f"request {key} has {video.chunks} chunks decoded; chunk {work.chunk} can't be next")
            yield video
            video.chunks += 1
            if not work.is_last:
                stack.pop_all()
                self._videos[key] = video

    def drop(self, key: str) -> None:
        """Delete what there is of a video, if it is here."""
        video = self._videos.pop(key, None)
        if video is not None:
            with video.mp4:
                pass

    def list_keys(self) -> list[str]:
        """Return the keys of all videos here."""
        return sorted(self._videos)


_Value = TypeVar("_Value", TextEmbedding, ImageCondition, DenoiseState)
_Work = TypeVar("_Work", Encoding, Denoising, Decoding)
_PREPARED_BY = {Encoding: "prepare_encode", Denoising: "prepare_denoise", Decoding: "prepare_decode"}


class PreparedRequests:
    """The prepared requests of one host, by key.

    Attributes:
        videos: Those whose last chunk isn't decoded.
    """

    def __init__(self) -> None:
        self.videos = OpenVideos()
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
        self.videos.drop(key)

    def list_keys(self) -> list[str]:
        """Return the keys of all requests here."""
        return sorted({*self._work, *self.videos.list_keys()})


def unpack_as(kind: type[_Value], payload: Payload | None) -> _Value | None:
    """Return the value of a payload, or None for None; raise `OutOfOrder` when it is of another kind."""
    if payload is None:
        return None
    value = unpack(payload)
    if not isinstance(value, kind):
        raise OutOfOrder(f"a {payload.kind} was given where a {kind.__name__} belongs; give that stage's payload")
    return value


def place_latents(
    runtime: Runtime[Model], request: ResolvedRequest, state: Payload, chunk: int | None = None
) -> Decoding:
    """Put final latents on the devices, or with `chunk` those of that chunk of the video.

    Raises:
        OutOfOrder: They aren't what the request's decoder takes.
    """
    spec, final = runtime.model.spec, unpack_as(DenoiseState, state)
    experts = spec.experts(request)
    last = experts[-1]
    shape: tuple[int, ...] = spec.decoded_shape(request)
    if chunk is not None:
        last = [expert for expert in experts if expert.chunk == chunk][-1]
        shape = spec.latent_shapes(request, last.stop)[VIDEO]
    needed: dict[str, Any] = {"step": last.stop, "latents": shape}
    actual: dict[str, Any] = {}
    if final is not None:
        actual = {"step": final.step, "latents": final.latents.shape}
    audio = None
    if spec.has_sound(request):
        needed["sound"] = spec.latent_shapes(request, last.stop)[AUDIO]
        if final is not None and final.audio is not None:
            audio = final.audio
            actual["sound"] = audio.shape
    if final is None or actual != needed:
        raise OutOfOrder(f"the decoder was given {_describe(actual)}; this request needs {_describe(needed)}")
    frames = stages.decoder_inputs(runtime, final.latents)
    return Decoding(request, frames, audio, chunk or 0, chunk is None or last is experts[-1])


def _describe(parts: dict[str, Any]) -> str:
    """Return a state's step and the shapes of its parts as text."""
    return ", ".join(f"{name} {value}" for name, value in parts.items()) or "nothing"
