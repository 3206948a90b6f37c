"""What is known of a request's latents, and so has no noise in any step: ends of other videos, and a given sound.

Known latents have timestep 0, as everything outside a retake has in ltx-pipelines (retake.py) and a given sound
(a2vid_two_stage.py), both of github.com/Lightricks/LTX-2 at 400fd310. The last latents of a video become the first of
the next as they are. So the first of them, which stands for eight frames, is taken for one frame; it isn't shown, as in
the extending sampler of Lightricks' ComfyUI-LTXVideo.

All of it travels as rows of one array [1, R, C]: latents of each size, first those of the beginning, then those of the
end, and then those of the sound, the same way.

Shapes: T latent frames, H W latent height and width, A latents of the sound, C channels.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from PIL import Image
from transformers.audio_utils import mel_filter_bank

from wan_tpu.errors import InvalidRequest
from wan_tpu.families.ltx2 import image
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.ltx2.spec import AUDIO_RATE, AUDIO_STRIDE, STRIDE, Room
from wan_tpu.families.shared.resampling import read_soundtrack
from wan_tpu.reference import Reference, find_goal, find_soundtrack, find_tail
from wan_tpu.request import ResolvedRequest
from wan_tpu.tail import Tail

WINDOW = 1024  # Samples of a window of the spectrogram: `n_fft` of Lightricks' audio VAE.
_QUIETEST = 1e-5  # The least amplitude of a mel band.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticRoom:
    """The rows of what is known, as a static argument of a program."""

    room: Room


def fit_room(room: Room, rows: Any) -> Room:
    """Return what the rows [1, R, C] hold, given that for a request without an image: with one, they are more."""
    return room if rows.shape[1] == room.rows else room._replace(frames=(1, 0))


class Ends(NamedTuple):
    """How many latents are known, of the first and of the last, among `total`."""

    first: int
    last: int
    total: int

    @property
    def segments(self) -> list[tuple[int, bool]]:
        """How many latents there are of each kind, in order, and whether they are known."""
        counts = (self.first, True), (self.total - self.first - self.last, False), (self.last, True)
        return [(count, is_known) for count, is_known in counts if count]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many latents there are in each segment."""
        return tuple(count for count, _ in self.segments)

    @property
    def mask(self) -> np.ndarray:
        """Which latents are known, bool [total]."""
        return np.concatenate([np.full(count, is_known) for count, is_known in self.segments])

    def choose_times(self, time: jax.Array) -> jax.Array:
        """Return the timestep of each segment, float32 [M]."""
        return jnp.stack([jnp.zeros_like(time) if is_known else time for _, is_known in self.segments])


# ---- From the host.


def find_ends(request: ResolvedRequest) -> tuple[Reference | None, Reference | None]:
    """Return the end that a request's video begins with, and the one that it ends with."""
    return find_tail(request.references), find_goal(request.references)


def read_frames(request: ResolvedRequest, room: Room) -> Iterator[np.ndarray]:
    """Yield the frames of a file's end in each size, float32 [1, 3, T, height, width] in [-1, 1].

    They are resized as an image is, and not compressed, as in diffusers' LTX2ConditionPipeline.
    """
    tail, _ = find_ends(request)
    if tail is None or (pixels := _get_source(tail).pixels) is None:
        return
    for size in list_sizes(room):
        frames = np.stack([image.fit_as_lightricks(Image.fromarray(frame), *size) for frame in pixels])
        yield (frames / np.float32(127.5) - 1).transpose(3, 0, 1, 2)[None]


def list_sizes(room: Room) -> list[tuple[int, int]]:
    """Return the (height, width) in pixels of each stage."""
    return [(height * STRIDE, width * STRIDE) for height, width in room.sizes]


def read_sounds(config: Ltx2Config, request: ResolvedRequest, room: Room) -> Iterator[np.ndarray]:
    """Yield the spectrogram of each known sound, float32 [1, 2, F, M]."""
    first, last = room.audio
    if (track := find_soundtrack(request.references)) is not None:
        yield make_mel(config, _get_source(track), first)
        return
    tail, goal = find_ends(request)
    if tail is not None and first:
        yield make_mel(config, _get_source(tail), first)
    if goal is not None and last:
        # Latents begin at whole multiples of their length, and so behind the first of the frames.
        begin = (request.frames - goal.frames) / request.fps
        sound = _get_source(goal)
        assert sound.sound is not None
        skipped = round((math.ceil(begin * AUDIO_RATE) / AUDIO_RATE - begin) * sound.rate)
        yield make_mel(config, dataclasses.replace(sound, sound=sound.sound[:, skipped:]), last)


def _get_source(reference: Reference) -> Tail:
    assert isinstance(reference.source, Tail)
    return reference.source


def make_mel(config: Ltx2Config, sound: Tail, latents: int) -> np.ndarray:
    """Return what the audio VAE encodes as so many latents, float32 [1, 2, 4 A - 3, M]; silence fills what is missing.

    It is the logarithm of a mel spectrogram of amplitudes: `AudioProcessor` of ltx_core/model/audio_vae/ops.py in
    github.com/Lightricks/LTX-2 at 400fd310.
    """
    settings = config.audio_vae
    rate, hop = settings["sample_rate"], settings["mel_hop_length"]
    frames = AUDIO_STRIDE * (latents - 1) + 1
    samples = read_soundtrack(sound, rate, (frames - 1) * hop + WINDOW // 2 + 1)  # Those that the windows reach.
    spectrum = torch.stft(
        torch.from_numpy(samples), WINDOW, hop, window=torch.hann_window(WINDOW), center=True, return_complex=True
    )
    mel = _mel_filters(rate, settings["mel_bins"]) @ spectrum.abs()[:, :, :frames]
    return mel.clamp(min=_QUIETEST).log().transpose(1, 2)[None].numpy()


@functools.cache
def _mel_filters(rate: int, bins: int) -> torch.Tensor:
    """Return [bins, frequencies]."""
    filters = mel_filter_bank(WINDOW // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(filters.T.astype(np.float32))


# ---- Rows.


def to_rows(config: Ltx2Config, request: ResolvedRequest, room: Room, encoded: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rows of all that is known, float32 [1, R, C]; narrow ones are filled with zeros.

    Args:
        config: The model's configuration.
        request: The request.
        room: Its rows.
        encoded: Latents of the image in each size, or of what `read_frames` yields, [1, C, T, H, W], and of what
            `read_sounds` yields, [A, C].
    """
    rows = np.zeros((1, room.rows, count_channels(config)), np.float32)
    rest, parts = iter(encoded), []
    for size in room.sizes:
        for end, count in zip(find_ends(request), room.frames, strict=True):
            if not count:
                continue
            shape = 1, config.vae["latent_channels"], count, *size
            source = None if end is None else _get_source(end)
            if source is None or source.pixels is not None:  # An image, or a file.
                latents = next(rest)
            else:
                given = (source.latents, source.smaller)
                fitting = [latents for latents in given if latents is not None and latents.shape == shape]
                if not fitting:  # An earlier version has planned it.
                    raise InvalidRequest(
                        f"the end of the video before has no latents of the shape {shape}; go on with the model and "
                        "size that made it, or from its file",
                        "references",
                    )
                latents = fitting[0]
            parts.append(latents[0].reshape(shape[1], -1).T)
    start = 0
    for part in (*parts, *rest):
        rows[0, start : start + len(part), : part.shape[1]] = part
        start += len(part)
    assert start == room.rows, f"{start} of {room.rows} rows"
    return rows


def count_channels(config: Ltx2Config) -> int:
    """Return the channels of the rows."""
    return max(config.transformer["in_channels"], config.transformer["audio_in_channels"])


# ---- Rows as latents again. No program may run for arrays of the host: previews are painted beside those of a slice.


def fill_video(room: Room, rows: Any, latents: Any) -> Any:
    """Return the video's latents [1, C, T, H, W], of one of the sizes, with the known ones in their places."""
    size, (first, last) = latents.shape[3:], room.frames
    area = math.prod(size)
    start = sum(room.frames) * sum(math.prod(other) for other in itertools.takewhile(lambda s: s != size, room.sizes))

    def take(begin: int, count: int) -> Any:
        part = rows[0, begin : begin + count * area, : latents.shape[1]]
        return part.T.reshape(1, latents.shape[1], count, *size)

    return _fill(take(start, first), latents, take(start + first * area, last), axis=2)


def fill_audio(room: Room, rows: Any, audio: Any) -> Any:
    """Return the sound's latents [1, A, C] with the known ones in their places."""
    first, last = room.audio
    known = rows[:, room.rows - first - last : room.rows, : audio.shape[2]]
    return _fill(known[:, :first], audio, known[:, first:], axis=1)


def _fill(first: Any, latents: Any, last: Any, axis: int) -> Any:
    xp: Any = np if isinstance(latents, np.ndarray) else jnp
    total = latents.shape[axis]
    middle = xp.split(latents, (first.shape[axis], total - last.shape[axis]), axis=axis)[1]
    return xp.concatenate([first, middle, last], axis=axis)
