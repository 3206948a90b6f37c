"""Positions of the rows of MiniMax-H3's sequence in time and space, computed on the host in float64 as in diffusers.

The transformer attends over one sequence of rows: the video's, the images' part of the text, the keyframes', the
sound's, the text's. Media begin behind the text in time, so that a text's length moves all of them: positions are
arguments of a program, not constants in it.

Shapes: T H W latent frames, rows and columns of tokens, A latents of each channel of the sound, R rows of text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# How many times 5/3 each latent frame lasts, in turn: the VAE turns seventeen frames into five.
_FRAMES = (1, 4, 4, 4, 4)
_RATE = 5.0 / 3.0
_SPACE = 32  # The side of a square video.


class Layout(NamedTuple):
    """The number of rows of each kind in a sequence, in this order; padding is at the end.

    Attributes:
        video: The video's tokens.
        vision: The text's rows of images.
        keyframes: Tokens of all keyframes.
        sound: Latents of the sound, one channel first.
        text: All other rows of the text, padding included.
    """

    video: int
    vision: int
    keyframes: int
    sound: int
    text: int

    @property
    def fixed_rows(self) -> int:
        """The number of rows before the text's."""
        return self.video + self.vision + self.keyframes + self.sound

    @property
    def rows(self) -> int:
        """The number of all rows."""
        return self.fixed_rows + self.text


def place_rows(
    grid: tuple[int, int, int],
    patch: tuple[int, int],
    sound: int,
    text: np.ndarray,
    count: int,
    vision: int = 0,
    anchors: Sequence[str] = (),
) -> np.ndarray:
    """Return time, height and width of every row, float32 [rows, 3], in the order of `Layout`.

    Args:
        grid: T, and the height and width of the latents.
        patch: Height and width of a token.
        sound: 2 A.
        text: The index of each row of the text, [R], rows of images first.
        count: The number of real rows of the text, those of images included; media begin at that time.
        vision: The number of rows of images.
        anchors: For each keyframe, "first" or "last": which end of the video it is.
    """
    frames, height, width = grid
    area = np.sqrt(height * width)
    rows, columns = (_spread(size, part, area) for size, part in zip((height, width), patch, strict=True))
    space = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
    spans = _RATE * np.resize(np.array(_FRAMES, np.float64), frames)
    times = count + np.concatenate([np.zeros(1), np.cumsum(spans[:-1], dtype=np.float64)])
    words = np.zeros((len(text), 3))
    words[:, 0] = text
    video = np.concatenate([np.repeat(times, len(space))[:, None], np.tile(space, (frames, 1))], axis=1)
    ends = {"first": float(count), "last": count + float(spans.sum()) - _RATE}
    keyframes = [np.concatenate([np.full((len(space), 1), ends[anchor]), space], axis=1) for anchor in anchors]
    latents = np.zeros((sound, 3))
    latents[:, 0] = count + np.tile(np.arange(sound // 2), 2)
    latents[:, 2] = np.repeat([columns[0], columns[-1]], sound // 2)  # Left and right.
    return np.concatenate([video, words[:vision], *keyframes, latents, words[vision:]]).astype(np.float32)


def _spread(size: int, part: int, area: float) -> np.ndarray:
    """Return the coordinates of one axis, which are centred; a square has 0 to `_SPACE`, without its end."""
    share = size / area
    start = (1.0 - share) / 2.0
    return np.linspace(start, start + share, size // part, endpoint=False) * _SPACE
