"""Turn a request's image or video into the history that the first chunk sees before it.

An image is the anchor, and its last latent frame as a still video of a chunk's length is the frame before the first
chunk. Of a video, the first frame is the anchor, and the frames before the first chunk are its last ones. All of them
get some noise, as histories had in training. The draws come in diffusers' order, before all others of the request.

Shapes: C channels, T latent frames, H W latent height and width, N chunks of a video.
"""

from collections.abc import Sequence

import numpy as np
import torch

from wan_tpu.families.helios.published import CHUNK_FRAMES, HISTORY

NOISE = (0.111, 0.135)  # The least and the largest share of noise: defaults of the pipelines.
ANCHORED = 1 + sum(HISTORY)  # Frames of a condition: the anchor, and the history without it.
# Number of chunks at the end of a video whose frames fit into the history; earlier ones are neither read nor encoded.
SOURCE_CHUNKS = -(-sum(HISTORY) // CHUNK_FRAMES)

Statistics = tuple[np.ndarray, np.ndarray]  # Mean and standard deviation of latents, [1, C, 1, 1, 1] each.


def condition_on_image(moments: np.ndarray, statistics: Statistics, generator: torch.Generator) -> np.ndarray:
    """Return the condition of an image, float32 [1, C, 20, H, W]: the anchor, then the frames before the first chunk.

    Args:
        moments: [1, 2C, 9, H, W], the VAE's output for a still video of the image.
        statistics: The latents' mean and standard deviation.
    """
    anchor = _draw_latents(moments[:, :, :1], statistics, generator)
    still = _draw_latents(moments, statistics, generator)[:, :, -1:]
    anchor = _mix_noise(anchor, 1, generator)
    return _join(anchor, _mix_noise(still, 1, generator))


def condition_on_video(
    moments: np.ndarray, statistics: Statistics, chunks: int, generator: torch.Generator
) -> np.ndarray:
    """Return the condition of a video, float32 [1, C, 20, H, W]: the anchor, then the video's last frames.

    Args:
        moments: [1, 2C, 1 + 9N, H, W], the VAE's output for the video's first frame and for each of its last N chunks.
        statistics: The latents' mean and standard deviation.
        chunks: How many whole chunks the video has, at least N. The noise of those before the last N is drawn, too.
    """
    anchor = _draw_latents(moments[:, :, :1], statistics, generator)
    ends = np.split(moments[:, :, 1:], range(CHUNK_FRAMES, moments.shape[2] - 1, CHUNK_FRAMES), axis=2)
    # The values of earlier chunks don't matter: only their draws count.
    padded = [ends[0]] * (chunks - len(ends)) + ends
    latents = [_draw_latents(chunk, statistics, generator) for chunk in padded]
    anchor = _mix_noise(anchor, 1, generator)
    return _join(anchor, *[_mix_noise(chunk, CHUNK_FRAMES, generator) for chunk in latents][-len(ends) :])


def _draw_latents(moments: np.ndarray, statistics: Statistics, generator: torch.Generator) -> np.ndarray:
    """Draw normalised latents [1, C, T, H, W] from moments [1, 2C, T, H, W]."""
    means, log_variances = np.split(moments.astype(np.float32), 2, axis=1)
    noise = torch.randn(means.shape, generator=generator).numpy()
    mean, deviation = statistics
    latents: np.ndarray = (means + np.exp(0.5 * np.clip(log_variances, -30, 20)) * noise - mean) * (1 / deviation)
    return latents


def _mix_noise(latents: np.ndarray, shares: int, generator: torch.Generator) -> np.ndarray:
    """Mix noise into latents [1, C, T, H, W]: the same share for all frames, or one for each."""
    least, largest = NOISE
    sigma = (torch.rand(shares, generator=generator) * (largest - least) + least).numpy().reshape(1, 1, -1, 1, 1)
    mixed: np.ndarray = sigma * torch.randn(latents.shape, generator=generator).numpy() + (1 - sigma) * latents
    return mixed


def _join(anchor: np.ndarray, *latents: np.ndarray) -> np.ndarray:
    """Return the anchor followed by the last frames, with zeros if there are fewer than the history has."""
    before = np.concatenate(latents, axis=2)[:, :, -sum(HISTORY) :]
    zeros = np.zeros((*before.shape[:2], sum(HISTORY) - before.shape[2], *before.shape[3:]), np.float32)
    return np.concatenate([anchor, zeros, before], axis=2)


def source_starts(frames: int, chunk_frames: int) -> Sequence[int]:
    """Return the first frame of each chunk of a video that is encoded; the last chunk ends with the video."""
    count = min(SOURCE_CHUNKS, frames // chunk_frames)
    return range(frames - count * chunk_frames, frames, chunk_frames)
