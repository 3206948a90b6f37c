"""Divide a video into chunks of nine latent frames, and each chunk into stages of growing size.

A chunk is denoised after the ones before, which it sees as its history. All functions here are pure; `noise.py` beside
this file draws. For each chunk, in order:

    stages = list_stages(pyramid, shape, patch, steps, chunk)
    latents = draw_first(shape, pyramid.stages, generator)                             # noise.py
    latents after a stage's steps, then for each other stage:
    alpha, beta = stage.mixing
    latents = alpha * enlarge(latents) + beta * draw_between(stage.shape, patch, gamma, generator)
    history of the next chunk = make_history(shape, [*chunks, latents], condition)         # conditioning.py

Shapes: [1, C, T, H, W] of latents, one letter a dimension as everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from wan_tpu.families.helios.published import HISTORY, PyramidConfig
from wan_tpu.families.helios.schedule import mixing_factors, stage_schedule
from wan_tpu.schedules.schedule import Schedule

if TYPE_CHECKING:  # Specs list stages, too, without JAX.
    import jax

Array = TypeVar("Array", np.ndarray, "jax.Array")
# The names in the result of `make_history`, farthest first, which is also the order of their tokens.
LONG, MID, SHORT = "history_long", "history_mid", "history_short"


@dataclass(frozen=True)
class PyramidStage:
    """Steps of one chunk at one size."""

    shape: tuple[int, ...]  # [1, C, T, H, W] of the latents.
    schedule: Schedule  # The numbers of its steps, which begin without a solver history (zeros).
    # The factors of the previous stage's enlarged latents, and of the noise that is added to them; None for the first
    # stage.
    mixing: tuple[float, float] | None


def stage_shapes(shape: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """Return the shapes of a chunk's latents from the smallest to [1, C, T, H, W], each twice as high and wide."""
    return [(*shape[:3], *(size >> (stages - 1 - stage) for size in shape[3:])) for stage in range(stages)]


def list_stages(
    pyramid: PyramidConfig, shape: Sequence[int], patch: Sequence[int], steps: Sequence[int], *, amplified: bool = False
) -> list[PyramidStage]:
    """Return the stages of a chunk.

    Args:
        shape: [1, C, T, H, W] of the finished chunk.
        patch: Latent frames, rows and columns of a token.
        steps: How many steps each stage has.
        amplified: Whether a distilled model takes twice as many, as the published settings do in the first chunk.
    """
    sizes = stage_shapes(shape, pyramid.stages)
    stages = []
    for stage, size in enumerate(sizes):
        # As in diffusers, a schedule is shifted by the number of tokens before the latents are enlarged.
        tokens = int(np.prod(sizes[max(0, stage - 1)][2:])) // int(np.prod(patch))
        schedule = stage_schedule(pyramid, stage, steps[stage], tokens, amplified=amplified)
        stages.append(PyramidStage(size, schedule, mixing_factors(pyramid, stage) if stage else None))
    return stages


def enlarge(latents: Array) -> Array:
    """Return latents [1, C, T, H, W] twice as high and wide: each value becomes a square of four."""
    return latents.repeat(2, axis=3).repeat(2, axis=4)


def make_history(
    shape: Sequence[int], chunks: Sequence[np.ndarray], condition: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Return what all steps of a chunk see of the earlier chunks: the last frames, and always the first one.

    Args:
        shape: [1, C, T, H, W] of a chunk.
        chunks: The earlier chunks, each of that shape.
        condition: [1, C, 20, H, W]: a first frame that replaces the first chunk's, and the frames before that chunk.

    Returns:
        Arrays float32 [1, C, 16, H, W], [1, C, 2, H, W] and [1, C, 2, H, W], the last of which begins with the first
        frame; zeros where there is nothing.
    """
    frames = sum(HISTORY)
    zeros = np.zeros((*shape[:2], 1 + frames, *shape[3:]), np.float32)
    anchor, start = np.split(zeros if condition is None else condition, [1], axis=2)
    if condition is None and len(chunks):
        anchor = chunks[0][:, :, :1]
    seen = chunks[-frames // shape[2] :]  # A long video's other chunks aren't copied every time.
    before = np.concatenate([start, *seen], axis=2)[:, :, -frames:]
    long, mid, last = np.split(before, np.cumsum(HISTORY[:-1]), axis=2)
    return {LONG: long, MID: mid, SHORT: np.concatenate([anchor, last], axis=2)}
