"""What is written of a video while it is decoded: its mp4, and its end for the next one."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from wan_tpu.data import DenoiseState
from wan_tpu.media.mp4 import Mp4
from wan_tpu.reference import find_tail
from wan_tpu.request import ResolvedRequest
from wan_tpu.spec import ModelSpec
from wan_tpu.tail import Overlap, Tail, find_sample


def open_mp4(request: ResolvedRequest, on_fragment: Callable[[bytes], object] | None = None) -> Mp4:
    """Return the mp4 of a request's video, without the frames that other parts of a longer video show."""
    return Mp4(
        request.fps,
        on_fragment,
        hidden_frames=request.hidden_frames,
        written_frames=request.written_frames,
        sound_origin=None if find_tail(request.references) is None else request.origin,
    )


class Ending(NamedTuple):
    """The last latents of a video, [1, C, T, H, W], and those of the first of two stages."""

    latents: np.ndarray
    smaller: np.ndarray | None

    @classmethod
    def of_state(cls, overlap: Overlap, state: DenoiseState) -> "Ending":
        """Copy those of a finished video."""
        smaller = None if state.smaller is None else np.array(state.smaller, np.float32)
        return cls(np.array(state.latents[:, :, -overlap.latents :], np.float32), smaller)


def cut_tail(
    spec: ModelSpec,
    request: ResolvedRequest,
    ending: Ending,
    sound: np.ndarray | None = None,
    rate: int | None = None,
) -> Tail | None:
    """Return the end of a finished video; None if the video is shorter than that.

    Args:
        spec: The model, which has an `overlap`.
        request: The video's.
        ending: The video's last latents.
        sound: All of it, [channels, samples]; None without sound.
        rate: Samples per second of the sound.
    """
    overlap = spec.overlap
    assert overlap is not None
    if request.frames < overlap.frames:
        return None
    numbers = request.height, request.width, overlap.frames, overlap.blended
    tail = Tail(ending.latents, None, *numbers, smaller=ending.smaller, fps=request.fps, vae=spec.vae)
    if sound is None or rate is None:
        return tail
    # Samples are counted over all parts of a video, so that rounding doesn't move any of them.
    places = request.origin, request.origin + request.frames - overlap.frames
    begin, first = (find_sample(place, rate, request.fps) for place in places)
    heard = np.array(sound[:, first - begin :], np.float32)
    return dataclasses.replace(tail, sound=heard, rate=rate)
