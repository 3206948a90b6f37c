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


_VIDEO, _TEXT, _SOUND = range(3)  # Kinds of rows, as the modulations' outputs have them.


class Layout(NamedTuple):
    """The number of rows of each kind in a sequence.

    Attributes:
        text: Rows of the text, those of images and padding included.
        keyframes: Tokens of all keyframes, or of all images and videos that are references, padding included.
        sound: Latents of the sound, one channel first.
        video: The video's tokens.
        pictures: How many images the text has, each behind a label.
        voices: Latents of the sounds that are references, padding included; None without references.
    """

    text: int
    keyframes: int
    sound: int
    video: int
    pictures: int
    voices: int | None = None

    @property
    def padded(self) -> tuple[int, int, int]:
        """The rows of the parts before the sound: text, keyframes and voices."""
        return self.text, self.keyframes, self.voices or 0

    @property
    def media(self) -> int:
        """The number of rows behind the text's real ones, those of references' padding included."""
        return sum(self.padded[1:]) + self.sound + self.video

    @property
    def rows(self) -> int:
        """The number of all rows."""
        return self.text + self.media

    @property
    def modulations(self) -> list[tuple[int, int]]:
        """The timestep (of `transformer.predict`) and the kind of each run of rows.

        Images in the text have the modulation of the video. With references, they come before all words.
        """
        if self.voices is not None:
            before = [(0, _VIDEO), (0, _TEXT), (2, _VIDEO), (3, _SOUND)]
        else:
            before = [(0, _TEXT), (0, _VIDEO)] * self.pictures + [(0, _TEXT)]
            before += [(2, _VIDEO)] if self.keyframes else []
        return [*before, (1, _SOUND), (0, _VIDEO)]

    @property
    def modulations_by_tiles(self) -> list[tuple[int, int]]:
        """The same in the order of tiles (`list_by_tiles`)."""
        words = 2 * self.pictures + 1
        return [self.modulations[-1], *self.modulations[words:-1], *self.modulations[:words]]


class Block(NamedTuple):
    """The rows of one reference.

    Attributes:
        grid: Latent frames, height and width of an image or a video; None for a sound.
        voices: Latents of each channel of its sound.
        is_end: Whether it is the end of the video that the target continues, and begins when the target does.
        is_goal: Whether it is the end of the target itself instead.
    """

    grid: tuple[int, int, int] | None
    voices: int = 0
    is_end: bool = False
    is_goal: bool = False

    @property
    def lasts(self) -> float:
        """How far the clock advances: one step for an image, none for a tail, else the longer of frames and sound."""
        if self.is_end:
            return 0.0
        if self.grid is None:
            return float(self.voices)
        if self.grid[0] == 1:
            return 1.0
        # Summed one after the other, as in diffusers; the sum in `place_rows` differs in its last bit.
        return max(float(self.voices), sum(_RATE * _FRAMES[i % len(_FRAMES)] for i in range(self.grid[0])))


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
    video, columns = _place_frames(grid, patch, float(count))
    words = np.zeros((count, 3))
    words[:, 0] = np.arange(count)
    ends = {"first": float(count), "last": count + float(_spans(grid[0]).sum()) - _RATE}
    frame = video[: len(video) // grid[0], 1:]
    keyframes = [np.concatenate([np.full((len(frame), 1), ends[anchor]), frame], axis=1) for anchor in anchors]
    padding = np.zeros((text - count, 3))
    parts = [words, *keyframes, _place_sound(sound // 2, float(count), columns), video, padding]
    return np.concatenate(parts).astype(np.float32)


def place_references(
    grid: tuple[int, int, int],
    patch: tuple[int, int],
    sound: int,
    order: np.ndarray,
    count: int,
    blocks: Sequence[Block],
    rows: int,
) -> np.ndarray:
    """Return the same for a sequence with references: text, their images and videos, their sounds, sound, video.

    Args:
        grid, patch, sound, count: As for `place_rows`.
        order: The index of each row of the text in the order in which it is read, [R].
        blocks: The references, in order.
        rows: The number of all rows; those that are missing are padding.
    """
    clock = float(count)
    words = np.zeros((count, 3))
    words[:, 0] = order[:count]
    columns = _place_frames(grid, patch, clock)[1]
    visible, voices = [], []
    for block in blocks:
        own, origin = columns, clock
        if block.is_goal and block.grid is not None:
            origin += float(_spans(grid[0])[: grid[0] - block.grid[0]].sum())
        if block.grid is not None:
            frames, own = _place_frames(block.grid, patch, origin)
            visible.append(frames)
        voices.append(_place_sound(block.voices, origin, own))
        clock += block.lasts
    video, _ = _place_frames(grid, patch, clock)
    parts = [words, *visible, *voices, _place_sound(sound // 2, clock, columns), video]
    padding = np.zeros((rows - sum(map(len, parts)), 3))
    return np.concatenate([*parts, padding]).astype(np.float32)


def _spans(frames: int) -> np.ndarray:
    """Return how long each latent frame lasts."""
    return _RATE * np.resize(np.array(_FRAMES, np.float64), frames)


def _place_frames(grid: tuple[int, int, int], patch: tuple[int, int], origin: float) -> tuple[np.ndarray, np.ndarray]:
    """Return time, height and width of every token, float64 [rows, 3], and the width of each column."""
    frames, height, width = grid
    area = np.sqrt(height * width)
    rows, columns = (_spread(size, part, area) for size, part in zip((height, width), patch, strict=True))
    space = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
    times = origin + np.concatenate([np.zeros(1), np.cumsum(_spans(frames)[:-1], dtype=np.float64)])
    places = np.concatenate([np.repeat(times, len(space))[:, None], np.tile(space, (frames, 1))], axis=1)
    return places, columns


def _place_sound(latents: int, origin: float, columns: np.ndarray) -> np.ndarray:
    """Return the same for the latents of both channels of a sound, [2 A, 3]."""
    places = np.zeros((2 * latents, 3))
    places[:, 0] = origin + np.tile(np.arange(latents), 2)
    places[:, 2] = np.repeat([columns[0], columns[-1]], latents)  # Left and right.
    return places


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


def end_references(vision: int, counts: Sequence[int], sound: int) -> np.ndarray:
    """Return the same for a sequence with references (`Layout.modulations`).

    Args:
        vision: The number of the text's rows that are of images.
        counts: The real rows of the text, of the references' images and videos, and of their sounds.
        sound: 2 A.
    """
    ends = np.cumsum(counts)
    return np.array([vision, *ends, ends[-1] + sound], np.int32)


def list_by_tiles(layout: Layout, count: int, order: np.ndarray) -> np.ndarray:
    """Return, for each row of a sequence in the order of its tiles, its place in the authors' order.

    With video sparse attention the order is video, keyframes, sound, text: the lengths of all but the last are known.

    Args:
        layout: How many rows of each kind there are.
        count: The number of real rows of the text.
        order: The video's tokens, in the order of its tiles.
    """
    others = count + np.arange(layout.keyframes + layout.sound)
    padding = np.arange(layout.media + count, layout.rows)
    return np.concatenate([count + len(others) + order, others, np.arange(count), padding])


def find_ends_by_tiles(ends: np.ndarray, layout: Layout) -> np.ndarray:
    """Return where runs of rows end in the order of tiles, from where they end in the authors' order (`find_ends`)."""
    text = ends[: 2 * layout.pictures + 1]
    behind = np.cumsum([layout.video, *([layout.keyframes] if layout.keyframes else []), layout.sound])
    return np.array([*behind, *(layout.media + text[:-1])], np.int32)


def _spread(size: int, part: int, area: float) -> np.ndarray:
    """Return the coordinates of one axis, which are centred; a square has 0 to `_SPACE`, without its end."""
    share = size / area
    start = (1.0 - share) / 2.0
    return np.linspace(start, start + share, size // part, endpoint=False) * _SPACE
