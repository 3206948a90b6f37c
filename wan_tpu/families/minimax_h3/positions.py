"""Positions of the rows of MiniMax-H3's sequence in time and space, computed on the host in float64 as in diffusers.

The transformer attends over one sequence of rows, in the order of its authors: the text's, the keyframes', the sound's,
the video's; padding is last. Media begin behind the text, in the sequence and in time, so that a text's length moves
all of them: positions and borders are arguments of a program, not constants in it.

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
    """The number of rows of each kind in a sequence.

    Attributes:
        text: Rows of the text, those of images and padding included.
        keyframes: Tokens of all keyframes.
        sound: Latents of the sound, one channel first.
        video: The video's tokens.
        pictures: How many images the text has.
    """

    text: int
    keyframes: int
    sound: int
    video: int
    pictures: int

    @property
    def media(self) -> int:
        """The number of rows behind the text's real ones."""
        return self.keyframes + self.sound + self.video

    @property
    def rows(self) -> int:
        """The number of all rows."""
        return self.text + self.media


def place_rows(
    grid: tuple[int, int, int],
    patch: tuple[int, int],
    sound: int,
    text: int,
    count: int,
    anchors: Sequence[str] = (),
) -> np.ndarray:
    """Return time, height and width of every row, float32 [rows, 3].

    Args:
        grid: T, and the height and width of the latents.
        patch: Height and width of a token.
        sound: 2 A.
        text: R, those of images and padding included.
        count: The number of real rows of the text; media begin at that time.
        anchors: For each keyframe, "first" or "last": which end of the video it is.
    """
    frames, height, width = grid
    area = np.sqrt(height * width)
    rows, columns = (_spread(size, part, area) for size, part in zip((height, width), patch, strict=True))
    space = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
    spans = _RATE * np.resize(np.array(_FRAMES, np.float64), frames)
    times = count + np.concatenate([np.zeros(1), np.cumsum(spans[:-1], dtype=np.float64)])
    words = np.zeros((count, 3))
    words[:, 0] = np.arange(count)
    video = np.concatenate([np.repeat(times, len(space))[:, None], np.tile(space, (frames, 1))], axis=1)
    ends = {"first": float(count), "last": count + float(spans.sum()) - _RATE}
    keyframes = [np.concatenate([np.full((len(space), 1), ends[anchor]), space], axis=1) for anchor in anchors]
    latents = np.zeros((sound, 3))
    latents[:, 0] = count + np.tile(np.arange(sound // 2), 2)
    latents[:, 2] = np.repeat([columns[0], columns[-1]], sound // 2)  # Left and right.
    padding = np.zeros((text - count, 3))
    return np.concatenate([words, *keyframes, latents, video, padding]).astype(np.float32)


def find_ends(vision: np.ndarray, pictures: int, count: int, keyframes: int, sound: int) -> np.ndarray:
    """Return where each run of rows with one modulation ends, int32; the video's, the last one, is left out.

    Runs are each image's label and the image itself, the rest of the text, keyframes if there are any, and sound.

    Args:
        vision: The index of each row of an image in the text.
        pictures: The number of images.
        count: The number of real rows of the text.
        keyframes: The number of their tokens.
        sound: 2 A.
    """
    blocks = np.split(vision, pictures) if pictures else []
    inside = [end for block in blocks for end in (block[0], block[-1] + 1)]
    behind = [count + keyframes] if keyframes else []
    return np.array([*inside, count, *behind, count + keyframes + sound], np.int32)


def _spread(size: int, part: int, area: float) -> np.ndarray:
    """Return the coordinates of one axis, which are centred; a square has 0 to `_SPACE`, without its end."""
    share = size / area
    start = (1.0 - share) / 2.0
    return np.linspace(start, start + share, size // part, endpoint=False) * _SPACE
