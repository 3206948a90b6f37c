"""References of a MiniMax-H3 request on their way to the transformer: files, pixels and samples, latents, rows.

Shapes: T latent frames, H W latent height and width, A latents of each channel of a sound, C channels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from wan_tpu.families.minimax_h3 import audio, vae
from wan_tpu.families.minimax_h3.clips import CLIP_FRAMES
from wan_tpu.families.minimax_h3.config import LATENTS_PER_S, MiniMaxH3Config
from wan_tpu.families.minimax_h3.references import (
    Measure,
    Room,
    count_rows,
    find_room,
    measure,
    read_end_voices,
    read_picture,
    read_soundtrack,
    read_video,
    read_voices,
    sample_frames,
)
from wan_tpu.families.minimax_h3.spec import CLIP_ENCODER, VOICE_ENCODER
from wan_tpu.families.minimax_h3.vision import pictures
from wan_tpu.families.shared.tokens import patchify, unpatchify
from wan_tpu.reference import CONTINUED, ENDS, GOAL, TAIL
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params
from wan_tpu.tail import Tail

IMAGE, CLIP, VOICES = "vae_encoder", CLIP_ENCODER, VOICE_ENCODER  # Components that encode references.


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticRoom:
    """The rows for references, as a static argument of a program."""

    room: Room


class Files(NamedTuple):
    """What is read of a request's files."""

    values: list[tuple[str, np.ndarray]]  # What is encoded, as in `list_shapes`, with the component that encodes it.
    patches: list[np.ndarray]  # What the text encoder sees of images and videos.


def read_files(config: MiniMaxH3Config, request: ResolvedRequest) -> Files:
    """Read a request's references; raises `InvalidRequest` for a file that has changed since it was measured."""
    values: list[tuple[str, np.ndarray]] = []
    patches = []
    for reference, size in zip(request.references or (), measure(config, request), strict=True):
        if size.kind == "image":
            picture = read_picture(reference, size)
            values.append((IMAGE, np.asarray(picture).transpose(2, 0, 1)[None, :, None]))
            patches.append(pictures.cut_patches(config, picture)[None])
        elif size.kind == "video":
            frames = read_video(reference, size)
            patches.append(pictures.cut_pairs(sample_frames(frames), size.sampled))
            values += _list_clips(frames[: size.encoded_frames])
        if isinstance(tail := reference.source, Tail):
            if size.locked:
                values.append((VOICES, read_soundtrack(config, request, tail)))
            if tail.pixels is not None:
                values += _list_clips(tail.pixels)
            if size.voices:
                values.append((VOICES, read_end_voices(config, tail, size)))
        elif size.voices:
            values.append((VOICES, read_voices(config, request, reference, size)))
    return Files(values, patches)


def list_shapes(config: MiniMaxH3Config, request: ResolvedRequest) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the component, the shape and the dtype of each value of `read_files`."""
    shapes: list[tuple[str, tuple[int, ...], str]] = []
    for size in measure(config, request):
        if size.kind == "image":
            shapes.append((IMAGE, (1, 3, 1, size.height, size.width), "uint8"))
        elif size.kind in ("video", CONTINUED):
            shapes += [(CLIP, (1, 3, CLIP_FRAMES, size.height, size.width), "uint8")] * _count_clips(size)
        if count := size.voices or size.locked:
            shapes.append((VOICES, (2, _count_samples(config, count)), "float32"))
    return shapes


def encode(component: str, module: Any, params: Params, mesh: Mesh, value: jax.Array) -> jax.Array:
    """Return moments [1, 2C, T, H, W] of pixels, or latents [2A, C] of samples, float32."""
    if component == VOICES:
        return audio.encode(module, params, value)
    encoder = vae.KeyframeEncoder(module, mesh)
    return encoder.run_first(params, value)[0] if component == IMAGE else encoder.encode_clip(params, value)


def to_rows(
    config: MiniMaxH3Config, request: ResolvedRequest, encoded: Sequence[np.ndarray], time: np.float32
) -> np.ndarray:
    """Return the rows of all references, float32 [1, rows, C], as many as `find_room` says; padding is zero.

    Those of images and videos come first, mixed with the request's first noise, and then those of sounds and of a
    soundtrack, which have fewer channels: zeros fill the others.

    Args:
        config: The model's configuration.
        request: The request.
        encoded: What `encode` has made of each of the `values`.
        time: How clean images and videos are, from 0 to 1.
    """
    measures, patch = measure(config, request), config.transformer["patch_size"]
    room, rest = find_room(config, measures), iter(encoded)
    noises = draw_noises(config, measures, torch.Generator("cpu").manual_seed(request.seed))
    visible, voices, locked = [], [], []
    for reference, size in zip(request.references or (), measures, strict=True):
        if size.latents is not None:
            if size.kind in (TAIL, GOAL):
                assert isinstance(reference.source, Tail) and reference.source.latents is not None
                latents = reference.source.latents
            else:
                moments = np.concatenate([next(rest) for _ in range(_count_clips(size))], axis=2)
                latents = vae.draw_latents(config, moments[:, :, : size.latents[0]])
            noised: Any = time * latents + (np.float32(1) - time) * next(noises)
            visible.append(np.asarray(patchify(noised, patch)))
        if size.voices:
            voices.append(next(rest))
        if size.locked:
            locked.append(next(rest))
    assert (sum(map(len, visible)), sum(map(len, voices))) == count_rows(patch, measures)
    rows = np.zeros((1, count_condition(room), config.vae["latent_channels"] * math.prod(patch)), np.float32)
    for start, parts in ((0, visible), (room.visible, voices), (room.visible + room.voices, locked)):
        if parts:
            joined = np.concatenate(parts)
            rows[0, start : start + len(joined), : joined.shape[1]] = joined
    return rows


def count_condition(room: Room) -> int:
    """Return the number of rows of `to_rows`."""
    return room.visible + room.voices + room.locked


class Known(NamedTuple):
    """What a video shares with another one: latents [1, C, T, H, W], and those of its sound [2, A, C]."""

    is_goal: bool  # Whether they are the video's end, not its beginning.
    latents: np.ndarray
    sound: np.ndarray


def read_known(
    config: MiniMaxH3Config, request: ResolvedRequest, rows: np.ndarray, time: np.float32
) -> Iterator[Known]:
    """Yield what a request's video shares with those before and behind it.

    Args:
        config: The model's configuration.
        request: The request.
        rows: From `to_rows`.
        time: As for `to_rows`.
    """
    measures, patch = measure(config, request), config.transformer["patch_size"]
    noises = draw_noises(config, measures, torch.Generator("cpu").manual_seed(request.seed))
    rows = np.asarray(rows)  # No program may run here: previews are painted beside those of a slice.
    token, voice = 0, find_room(config, measures).visible
    for size in measures:
        tokens, voices = count_rows(patch, [size])
        noise = next(noises) if size.latents is not None else None
        if size.kind in ENDS and noise is not None:
            noised = unpatchify(rows[0, token : token + tokens], noise.shape, patch)
            sound = rows[0, voice : voice + voices, : config.audio_vae["latent_channels"]]
            latents = (noised - (np.float32(1) - time) * noise) / time
            yield Known(size.kind == GOAL, latents, sound.reshape(2, size.voices, sound.shape[1]))
        token, voice = token + tokens, voice + voices


def draw_noises(
    config: MiniMaxH3Config, measures: Sequence[Measure], generator: torch.Generator
) -> Iterator[np.ndarray]:
    """Draw the noise of images and videos, one after the other."""
    for size in measures:
        if size.latents is not None:
            yield torch.randn((1, config.vae["latent_channels"], *size.latents), generator=generator).numpy()


def _count_samples(config: MiniMaxH3Config, latents: int) -> int:
    """Return the samples of so many latents of each channel of a sound."""
    return int(config.audio_vae["sampling_rate"]) // LATENTS_PER_S * latents


def _count_clips(size: Measure) -> int:
    """Return how many of the values are of an image or a video."""
    return -(-size.encoded_frames // CLIP_FRAMES)


def _list_clips(frames: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the clips of a video's frames [T, H, W, 3], to encode; the last frame fills the last clip."""
    padding = -len(frames) % CLIP_FRAMES
    filled = np.concatenate([frames, np.repeat(frames[-1:], padding, axis=0)])
    clips = np.split(filled, len(filled) // CLIP_FRAMES)
    return [(CLIP, clip.transpose(3, 0, 1, 2)[None]) for clip in clips]
