"""References of a MiniMax-H3 request: how large each is, and what is computed of their files on the host.

The numbers are those of diffusers 0.42.1, modular_pipelines/minimax_h3/before_encoder.py. Its sizes of images, a short
side of 2048 pixels, are "max"; "match" never enlarges an image and keeps it within the video's number of pixels, as in
ComfyUI (`ref_image_size`) and SGLang (`reference_resize_mode`), with which LightX2V's adapters are trained.

Shapes: T frames, H W height and width in pixels.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from wan_tpu.errors import InvalidRequest
from wan_tpu.families.minimax_h3.clips import CLIP_FRAMES, CLIP_LATENTS
from wan_tpu.families.minimax_h3.config import LATENTS_PER_S, STRIDE, MiniMaxH3Config, count_voices
from wan_tpu.families.minimax_h3.positions import Block
from wan_tpu.families.minimax_h3.vision import pictures
from wan_tpu.families.shared import resampling
from wan_tpu.families.shared.resampling import count_resampled, resample
from wan_tpu.media.reading import read_clip, read_sound
from wan_tpu.reference import ENDS, FPS, GOAL, SOUNDTRACK, UNREAD, Reference
from wan_tpu.request import MATCH, ResolvedRequest, nearest_multiple
from wan_tpu.tail import Overlap, Tail

MULTIPLE = 2 * STRIDE  # Of all sides in pixels.
LONGEST = 4  # The widest reference, divided by its height.
SHORTEST = CLIP_FRAMES + CLIP_LATENTS  # Frames. The VAE would repeat the last frame of a shorter video.
# A video that goes on from another one begins with its last clip, whose last frames the VAE blends with those of the
# next clip.
OVERLAP = Overlap(frames=SHORTEST, latents=CLIP_LATENTS + 2, blended=CLIP_LATENTS)
SAMPLED = FPS // 2  # The text encoder sees every twelfth frame, two a second, in pairs.
PAIR = 2
ROOM = 1024  # The rows that references take are rounded up to a multiple of it, so that few programs serve them all.
# Rows of the text that images and videos may take. Each is a row of Qwen3-VL's 50 layers, and of every step.
MOST_VISION_ROWS = 32 * 1024


class Measure(NamedTuple):
    """How large a reference is, as the model takes it."""

    kind: str  # A reference's: "image", "video", "audio", "tail", "continued", "goal" or "soundtrack".
    height: int  # Pixels of an image or a video; 0 for a sound.
    width: int
    frames: int  # Of a video; 1 for an image, 0 for a sound.
    voices: int  # Latents of each channel of its sound.
    locked: int = 0  # The same of a soundtrack, which is the new video's sound, not one beside it.

    @property
    def encoded_frames(self) -> int:
        """How many of its frames the VAE encodes: 17 n + 5 of a video."""
        return (self.frames - CLIP_LATENTS) // CLIP_FRAMES * CLIP_FRAMES + CLIP_LATENTS if self.frames > 1 else 1

    @property
    def latents(self) -> tuple[int, int, int] | None:
        """Frames, height and width of its latents; None for a sound."""
        if not self.frames:
            return None
        frames = (self.encoded_frames - CLIP_LATENTS) // CLIP_FRAMES * CLIP_LATENTS + 2 if self.frames > 1 else 1
        return frames, self.height // STRIDE, self.width // STRIDE

    @property
    def block(self) -> Block:
        """Its rows in the sequence."""
        return Block(self.latents, self.voices, self.kind in ENDS, self.kind == GOAL)

    @property
    def sampled(self) -> int:
        """How many frames of a video the text encoder sees."""
        return -(-self.frames // SAMPLED)


class Part(NamedTuple):
    """What the text encoder reads of a reference: a label, and maybe an image or a pair of frames behind it."""

    label: str
    grid: tuple[int, int] | None  # Rows and columns of the image's tokens; None for a label alone.


class Room(NamedTuple):
    """The rows of a program for references, padding included."""

    vision: int  # Of images and pairs of frames in the text.
    visible: int  # Tokens of images and videos.
    voices: int  # Latents of sounds, of both channels.
    locked: int = 0  # The same of a soundtrack.


# ---- Sizes.


def measure(config: MiniMaxH3Config, request: ResolvedRequest) -> list[Measure]:
    """Return how large each of a request's references is; raises `InvalidRequest` for one that the model can't take."""
    return [
        _measure_reference(config, request, reference, f"reference {number}, {reference}")
        for number, reference in enumerate(request.references or (), 1)
    ]


def _measure_reference(config: MiniMaxH3Config, request: ResolvedRequest, reference: Reference, name: str) -> Measure:
    height, width, frames = reference.height, reference.width, int(reference.kind == "image")
    if reference.kind == SOUNDTRACK:
        return Measure(SOUNDTRACK, 0, 0, 0, 0, locked=count_voices(request.frames))
    if reference.kind != "audio" and max(height, width) > LONGEST * min(height, width):
        raise InvalidRequest(
            f"{name} has the wrong shape; allowed are 1:{LONGEST} to {LONGEST}:1: crop it", "references"
        )
    if reference.kind == "image":
        height, width = fit_image(config, request, height, width)
    elif reference.kind in ENDS:
        frames = reference.frames
    elif reference.kind == "video":
        height, width = fit_canvas(config, height, width)
        frames = min(reference.frames, request.frames)
        if frames < SHORTEST:
            raise InvalidRequest(
                f"{name} is too short: it has {frames} frames at {FPS} a second; give at least {SHORTEST}",
                "references",
            )
    voices = 0
    rate = config.audio_vae["sampling_rate"]
    if reference.kind in ENDS:  # Of its sound, only whole latents are of use.
        samples = count_resampled(reference.samples, reference.sample_rate, rate) if reference.samples else 0
        # There may be a little more than that of its frames, but all ends are to have the same programs.
        voices = min(samples // (rate // LATENTS_PER_S), int(frames / FPS * LATENTS_PER_S))
    elif reference.samples:
        cut = min(reference.samples, count_cut(request, reference.sample_rate))
        voices = -(-count_resampled(cut, reference.sample_rate, rate) // (rate // LATENTS_PER_S))
    if reference.kind == "audio" and not voices:
        raise InvalidRequest(f"{name} has no samples; give a longer sound", "references")
    return Measure(reference.kind, height, width, frames, voices)


def fit(config: MiniMaxH3Config, request: ResolvedRequest, kind: str, size: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) at which the model takes an image or a video of another (height, width)."""
    return fit_canvas(config, *size) if kind == "video" else fit_image(config, request, *size)


def fit_image(config: MiniMaxH3Config, request: ResolvedRequest, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) at which the model takes an image."""
    scale = config.reference_edge / min(height, width)
    if request.reference_size == MATCH:
        scale = min(1.0, math.sqrt(request.height * request.width / (height * width)))
    return nearest_multiple(height * scale, MULTIPLE), nearest_multiple(width * scale, MULTIPLE)


def fit_canvas(config: MiniMaxH3Config, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) at which the model takes a video."""
    ratio, short = width / height, config.short_edge
    canvas_height, canvas_width = (float(short), short * ratio) if ratio >= 1 else (short / ratio, float(short))
    if (area := canvas_height * canvas_width) > config.most_pixels:
        scale = (config.most_pixels / area) ** 0.5
        canvas_height, canvas_width = canvas_height * scale, canvas_width * scale
    return nearest_multiple(canvas_height, MULTIPLE), nearest_multiple(canvas_width, MULTIPLE)


def count_cut(request: ResolvedRequest, rate: int) -> int:
    """Return the most samples that a sound keeps: it ends with the video that is made."""
    return int(request.frames / FPS * rate)


def read_parts(config: MiniMaxH3Config, measures: Sequence[Measure]) -> Iterator[Part]:
    """Yield what the text encoder reads before the prompt."""
    counts = dict.fromkeys(("Audio", "Picture", "Video"), 0)

    def label(name: str) -> str:
        counts[name] += 1
        return f"<{name} {counts[name]}>: "

    for reference in measures:
        if reference.kind in UNREAD:
            continue
        if reference.voices:
            yield Part(label("Audio"), None)
        if reference.kind == "image":
            yield Part(label("Picture"), pictures.token_grid(config, reference.height, reference.width))
        elif reference.kind == "video":
            yield Part(label("Video"), None)
            grid = pictures.clip_grid(reference.sampled, reference.height, reference.width)
            for first in range(0, reference.sampled, PAIR):
                second = min(first + 1, reference.sampled - 1)
                # A half is rounded to even: the first pair, at a quarter of a second, is 0.2.
                yield Part(f"<{(first + second) / 2 * SAMPLED / FPS:.1f} seconds>", grid)


def list_seen(config: MiniMaxH3Config, measures: Sequence[Measure]) -> list[tuple[int, tuple[int, int], int]]:
    """Return, for each image and video, the number of images in the text, their tokens' grid, and frames of a patch."""
    seen = []
    for reference in measures:
        grids = [part.grid for part in read_parts(config, [reference]) if part.grid is not None]
        if grids:
            seen.append((len(grids), grids[0], PAIR if reference.kind == "video" else 1))
    return seen


def count_vision(config: MiniMaxH3Config, measures: Sequence[Measure]) -> int:
    """Return how many rows of the text are of images and videos."""
    grids = (part.grid for part in read_parts(config, measures))
    return sum(math.prod(grid) + pictures.MARKS for grid in grids if grid is not None)


def count_rows(patch: Sequence[int], measures: Sequence[Measure]) -> tuple[int, int]:
    """Return how many rows of the sequence are tokens of images and videos, and how many are of their sounds."""
    tokens = (math.prod(latents) // math.prod(patch) for m in measures if (latents := m.latents) is not None)
    return sum(tokens), sum(2 * reference.voices for reference in measures)


def find_room(config: MiniMaxH3Config, measures: Sequence[Measure]) -> Room:
    """Return the rows of the programs for references of these sizes."""
    visible, voices = count_rows(config.transformer["patch_size"], measures)
    vision, visible, voices = (-(-count // ROOM) * ROOM for count in (count_vision(config, measures), visible, voices))
    return Room(vision, visible, voices, locked=sum(2 * size.locked for size in measures))


def check(config: MiniMaxH3Config, request: ResolvedRequest) -> None:
    """Refuse references that the model can't take, and more than its text encoder reads; raises `InvalidRequest`."""
    measures = measure(config, request)
    rows = count_vision(config, measures)
    if rows <= MOST_VISION_ROWS:
        return
    fitting = next(n for n in range(len(measures), -1, -1) if count_vision(config, measures[:n]) <= MOST_VISION_ROWS)
    first = f"the first {fitting} of them, which take {count_vision(config, measures[:fitting])}"
    matched = count_vision(config, measure(config, dataclasses.replace(request, reference_size=MATCH)))
    smaller = f", or reference_size {MATCH}, with which all take {matched}" if matched < rows else ""
    raise InvalidRequest(
        f"references take {rows} rows of text; allowed: at most {MOST_VISION_ROWS}; give "
        f"{first if fitting else 'shorter ones'}{smaller}",
        "references",
    )


# ---- Files.


def read_picture(reference: Reference, size: Measure) -> Image.Image:
    """Return an image in the size in which the model takes it."""
    assert isinstance(reference.source, Image.Image)
    target = size.width, size.height
    if reference.source.size == target:
        return reference.source
    return reference.source.resize(target, Image.Resampling.LANCZOS)


def read_video(reference: Reference, size: Measure) -> np.ndarray:
    """Return a video's frames, uint8 [T, H, W, 3]."""
    assert reference.source is not None and not isinstance(reference.source, Image.Image | Tail)
    frames = read_clip(reference.source, fps=FPS, height=size.height, width=size.width, count=size.frames)
    if len(frames) != size.frames:
        raise InvalidRequest(f"{reference} has changed: it has {len(frames)} frames; start again", "references")
    return frames


def read_voices(config: MiniMaxH3Config, request: ResolvedRequest, reference: Reference, size: Measure) -> np.ndarray:
    """Return a sound in stereo at the rate of the audio VAE, float32 [2, samples], in whole latents."""
    assert reference.source is not None and not isinstance(reference.source, Image.Image | Tail)
    samples, rate = read_sound(reference.source, request.frames / FPS)
    target = config.audio_vae["sampling_rate"]
    stereo = resample(np.broadcast_to(samples, (2, samples.shape[1])), rate, target)
    latent = target // LATENTS_PER_S
    if -(-stereo.shape[1] // latent) != size.voices:
        raise InvalidRequest(
            f"{reference} has changed: it has {samples.shape[1]} samples at {rate} Hz; start again", "references"
        )
    return np.pad(stereo, ((0, 0), (0, -stereo.shape[1] % latent)))


def read_end_voices(config: MiniMaxH3Config, tail: Tail, size: Measure) -> np.ndarray:
    """Return the sound of the end of a video as `read_voices` does, but without what is left of its last latent."""
    assert tail.sound is not None
    target = config.audio_vae["sampling_rate"]
    stereo = resample(np.broadcast_to(tail.sound, (2, tail.samples)), tail.rate, target)
    return stereo[:, : target // LATENTS_PER_S * size.voices]


def read_soundtrack(config: MiniMaxH3Config, request: ResolvedRequest, track: Tail) -> np.ndarray:
    """Return a soundtrack as `read_voices` does, as long as the video's sound."""
    target = config.audio_vae["sampling_rate"]
    return resampling.read_soundtrack(track, target, target // LATENTS_PER_S * count_voices(request.frames))


def sample_frames(frames: np.ndarray) -> np.ndarray:
    """Return pairs of the frames that the text encoder sees, uint8 [pairs, 2, H, W, 3]; the last one may be twice."""
    sampled = frames[::SAMPLED]
    sampled = np.concatenate([sampled, sampled[-1:]][: 1 + len(sampled) % PAIR])
    return sampled.reshape(-1, PAIR, *frames.shape[1:])
