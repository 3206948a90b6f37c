"""Find the things in frames by colour and outline, and follow them, without a network, so the eye can check it.

Shapes: T frames, H W pixels. Pictures are float32 in [0, 1].
"""

from dataclasses import dataclass

import numpy as np

from .scenes import AREAS, COLOURS, SHAPES, Scene, Thing, background, coverage

_LEAST_SHARE = 0.35  # A thing counts in pixels that it covers by this share; noise of 28 dB reaches less.
_LARGEST_MISMATCH = 0.3  # The largest distance of a pixel from the best mixture of background and colour.
_GATE = 1.9  # Pixels further from a thing than this many radii aren't its own; the tips of a star are at 1.3.


@dataclass(frozen=True)
class Track:
    """Where a thing is in each frame.

    Attributes:
        states: x and y of the centre and the radius in pixels, float64 [T, 3]; those of the frame before where the
            thing isn't seen.
        seen: Whether there is enough of its colour, and not far too much, bool [T].
    """

    states: np.ndarray
    seen: np.ndarray


def smooth(frames: np.ndarray) -> np.ndarray:
    """Return pictures [T, H, W, 3] averaged over 3 x 3 pixels."""
    padded = np.pad(frames, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return (rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]) / 9


def shares(frames: np.ndarray, scene: Scene) -> dict[str, np.ndarray]:
    """Return how much of each pixel is of each colour, by its name; float32 [T, H, W] in [0, 1].

    A pixel is taken for a mixture of the scene's background and one colour, that which leaves the least over.
    """
    still = background(scene) / 255
    apart = frames - still
    parts, left_over = [], []
    for colour in COLOURS.values():
        way = np.asarray(colour, np.float32) / 255 - still
        part = np.clip((apart * way).sum(-1) / (way * way).sum(-1), 0, 1)
        parts.append(part)
        left_over.append(np.linalg.norm(apart - part[..., None] * way, axis=-1))
    best = np.argmin(left_over, axis=0)
    clear = np.min(left_over, axis=0) < _LARGEST_MISMATCH
    return {
        name: np.where((best == i) & clear & (parts[i] > _LEAST_SHARE), parts[i], 0) for i, name in enumerate(COLOURS)
    }


def follow(thing: Thing, share: np.ndarray) -> Track:
    """Follow a thing from where it is at first; `share` [T, H, W] is that of its colour."""
    states, seen = [], []
    x, y, radius = thing.x, thing.y, thing.radius
    for weights in share:
        blob = _locate(weights, x, y, radius, thing.shape)
        # It shrinks to half its radius and grows to 1.8 times; half of that again may be hidden or blurred.
        plausible = blob is not None and 0.4 * thing.radius < blob[2] < 2.5 * thing.radius
        if blob is not None and plausible:
            x, y, radius = blob
        seen.append(plausible)
        states.append((x, y, radius))
    return Track(np.array(states), np.array(seen))


def _locate(weights: np.ndarray, x: float, y: float, radius: float, shape: str) -> tuple[float, float, float] | None:
    """Return centre and radius of the blob of weights [H, W]: of all at first, then of what is near its middle."""
    rows, columns = np.mgrid[: weights.shape[0], : weights.shape[1]] + 0.5
    # Nearer to where it was counts more: strays of its colour elsewhere mustn't drag the first guess away.
    near = weights / (1 + (np.hypot(columns - x, rows - y) / (3 * radius)) ** 2)
    for _ in range(3):
        total = near.sum()
        if total < 4:  # pixels; a tenth of the smallest thing
            return None
        x, y = float((near * columns).sum() / total), float((near * rows).sum() / total)
        size = float(np.sqrt(total / AREAS[shape]))
        near = np.where(np.hypot(columns - x, rows - y) < _GATE * max(size, radius), weights, 0)
    size = float(np.sqrt(near.sum() / AREAS[shape]))
    return x, y, size


def outline(share: np.ndarray, state: np.ndarray) -> str:
    """Return the shape that best fits, at any angle, what one frame [H, W] shows at state (x, y, radius)."""
    rows, columns = np.mgrid[: share.shape[0], : share.shape[1]] + 0.5
    x, y, radius = state
    near = np.where(np.hypot(columns - x, rows - y) < _GATE * radius, share, 0)
    area = near.sum()
    best, name = -1.0, ""
    for shape in SHAPES:
        size = np.sqrt(area / AREAS[shape])
        for angle in np.arange(0, 2 * np.pi, np.pi / 12) if shape != "ball" else [0.0]:
            drawn = coverage(shape, columns - x, rows - y, size, angle)
            overlap = np.minimum(drawn, near).sum() / np.maximum(drawn, near).sum()
            if overlap > best:
                best, name = overlap, shape
    return name


def still_part(frames: np.ndarray, scene: Scene) -> float:
    """Return how much the still part changes from the first frame: the root mean square of the worst frame.

    It compares pixels that no thing covers in either frame, a little smoothed.
    """
    softer = smooth(smooth(frames))
    foreground = np.sum(list(shares(softer, scene).values()), axis=0) > 0
    spread = smooth(np.repeat(foreground[..., None], 3, -1).astype(np.float32))[..., 0] > 0
    if spread[0].mean() > 0.9:
        return 1.0
    changes = []
    for frame, covered in zip(softer[1:], spread[1:], strict=True):
        free = ~(covered | spread[0])
        # A picture full of what isn't background isn't steady.
        changes.append(np.sqrt(np.square(frame - softer[0])[free].mean()) if free.mean() > 0.3 else 1.0)
    return float(np.max(changes))
