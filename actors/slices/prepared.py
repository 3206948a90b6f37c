"""Hold requests whose inputs are on a host's devices, from one call of the host to the next."""

import contextlib
import dataclasses
from collections import deque
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
from wan_tpu.runtime.components import DTYPES
from wan_tpu.runtime.health import ColourRange
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stages.chunks import chunk_of
from wan_tpu.stages.written import Ending, open_mp4

# The most requests whose decoder's noise waits in a host's memory: 1.5 GB each for five seconds at 1080p. They are as
# many as have a place on the devices. Others' noise is drawn once their latents are here.
MAX_NOISES = 3


class OutOfOrder(WanTpuError):
    """A host was called in an impossible order, which is the fault of its driver or leader, never of a request."""


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A request whose image is to be encoded."""

    request: ResolvedRequest
    inputs: stages.ImageInputs


@dataclasses.dataclass
class Denoising:
    """A request at the experts: its inputs on the devices, and its run once it has begun.

    Attributes:
        plan: The request's plan, with its adapters in host memory.
        inputs: The inputs by expert. They differ: an expert without guidance takes only the prompt, and latents of
            another size need other positions.
        state: The state to begin from.
        run: The run of the current expert, or None between two experts.
        painted: Previews that the leader hasn't taken yet: the steps that were done, and JPEGs.
    """

    plan: RequestPlan
    inputs: dict[Expert, stages.ExpertInputs]
    state: DenoiseState
    run: stages.ExpertRun | None = None
    previews: bool = False
    painted: deque[tuple[int, bytes]] = dataclasses.field(default_factory=deque)

    @property
    def last_state(self) -> DenoiseState:
        run = self.run  # Read once, because the other thread may end it meanwhile.
        return self.state if run is None else run.state

    @property
    def resumable(self) -> DenoiseState:
        """The latest state that can be copied out while the next step runs."""
        run = self.run  # Read once, because the other thread may end it meanwhile.
        return self.state if run is None else run.resumable

    def copy_chunk(self, chunk: int) -> DenoiseState:
        """Copy the latents of a chunk of the video to the host; raise `OutOfOrder` unless the chunk is denoised."""
        state, stop = self.last_state, self.plan.chunk_stops[chunk]
        if state.step < stop:
            raise OutOfOrder(f"chunk {chunk} is denoised after {stop} steps, but only {state.step} are done")
        return DenoiseState(chunk_of(self.plan, state, chunk), step=stop)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A request whose latents are to be decoded.

    Attributes:
        frames: The latents, as `stages.decoder_inputs` returns them.
        audio: The sound's latents; None if the video has no sound.
        ending: The last latents, if the video's end is kept.
        chunk: The number of the chunk that the latents belong to, if the video is decoded chunk by chunk.
        is_last: Whether this is the last chunk of the video.
    """

    request: ResolvedRequest
    frames: list[jax.Array]
    audio: np.ndarray | None
    chunk: int = 0
    is_last: bool = True
    ending: Ending | None = None


@dataclasses.dataclass
class OpenVideo:
    """A video that is being decoded: its mp4, and what is tracked across its chunks.

    Attributes:
        colours: The range of colours in all frames so far.
    """

    mp4: Mp4
    colours: ColourRange = dataclasses.field(default_factory=ColourRange)
    chunks: int = 0


class OpenVideos:
    """The videos of one host that still lack some chunks, by the keys of their requests."""

    def __init__(self) -> None:
        self._videos: dict[str, OpenVideo] = {}

    @contextlib.contextmanager
    def add_to(self, key: str, work: Decoding, on_fragment: Callable[[bytes], None] | None) -> Iterator[OpenVideo]:
        """Yield a request's video to the block, which decodes one chunk. The video stays open until the last chunk.

        Args:
            on_fragment: Called with fragments of the video. It takes effect with the first chunk only.
        """
        request, video = work.request, self._videos.pop(key, None)
        if video is None:
            video = OpenVideo(open_mp4(request, on_fragment))
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
        video = self._videos.pop(key, None)
        if video is not None:
            with video.mp4:
                pass

    def list_keys(self) -> list[str]:
        return sorted(self._videos)


_Value = TypeVar("_Value", TextEmbedding, ImageCondition, DenoiseState)
_Work = TypeVar("_Work", Encoding, Denoising, Decoding)
_PREPARED_BY = {Encoding: "prepare_encode", Denoising: "prepare_denoise", Decoding: "prepare_decode"}


class PreparedRequests:
    """The prepared requests of one host, by key.

    Attributes:
        videos: The videos whose last chunk hasn't been decoded.
    """

    def __init__(self) -> None:
        self.videos = OpenVideos()
        self._work: dict[str, Encoding | Denoising | Decoding] = {}
        self._noises: dict[str, Callable[[], stages.Noise]] = {}  # Each waits until the noise is drawn.

    def put(self, key: str, work: Encoding | Denoising | Decoding) -> None:
        """Hold a request's work, in place of any that has the same key."""
        self._work[key] = work

    def get(self, key: str, kind: type[_Work]) -> _Work:
        """Return a request's work; raise `OutOfOrder` unless there is work of that kind."""
        work = self._work.get(key)
        if not isinstance(work, kind):
            raise OutOfOrder(f"request {key} is not ready for this; call {_PREPARED_BY[kind]} first")
        return work

    def take(self, key: str, kind: type[_Work]) -> _Work:
        """Return a request's work as `get` does, and release it."""
        work = self.get(key, kind)
        del self._work[key]
        return work

    def draw_ahead(self, key: str, runtime: Runtime[Model], request: ResolvedRequest) -> None:
        """Begin to draw the noise of a request's decoder, unless `MAX_NOISES` others wait here."""
        if len(self._noises) < MAX_NOISES:
            self._noises[key] = stages.draw_ahead(runtime.model, request, DTYPES[runtime.dtype])

    def take_noise(self, key: str) -> Callable[[], stages.Noise] | None:
        """Return what waits for a request's noise, and release it; None if it isn't drawn ahead."""
        return self._noises.pop(key, None)

    def drop(self, key: str) -> None:
        self._work.pop(key, None)
        self._noises.pop(key, None)
        self.videos.drop(key)

    def list_keys(self) -> list[str]:
        return sorted({*self._work, *self._noises, *self.videos.list_keys()})


def unpack_as(kind: type[_Value], payload: Payload | None) -> _Value | None:
    """Return the value of a payload, or None for None; raise `OutOfOrder` when it is of another kind."""
    if payload is None:
        return None
    value = unpack(payload)
    if not isinstance(value, kind):
        raise OutOfOrder(f"the payload is a {payload.kind} instead of a {kind.__name__}; give that stage's payload")
    return value


def place_latents(
    runtime: Runtime[Model],
    request: ResolvedRequest,
    state: Payload,
    chunk: int | None = None,
    noise: Callable[[], stages.Noise] | None = None,
) -> Decoding:
    """Put final latents on the devices, and the decoder's noise if it takes any.

    Args:
        chunk: The chunk of the video that the latents belong to; None if they are those of all.
        noise: Waits for noise that is drawn ahead. With None, it is drawn here.

    Raises:
        OutOfOrder: The latents don't have the shapes that the request's decoder takes.
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
        raise OutOfOrder(f"the decoder received {_describe(actual)}; this request needs {_describe(needed)}")
    drawn = stages.draw_noise(runtime.model, request, DTYPES[runtime.dtype]) if noise is None else noise()
    frames = stages.decoder_inputs(runtime, final.latents, drawn)
    ending = None
    # A snapshot of an earlier version lacks the latents of the first of two stages.
    lacks_latents = final.smaller is None and any(expert.enlarges for expert in experts)
    if request.keeps_tail and spec.overlap is not None and not lacks_latents:
        ending = Ending.of_state(spec.overlap, final)
    return Decoding(request, frames, audio, chunk or 0, chunk is None or last is experts[-1], ending)


def _describe(parts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parts.items()) or "nothing"
