"""Score a clip: its first frame, colour, outline, direction, kind and speed of motion, and background.

Things are recognised by colour and outline and followed without a neural network, so that a person can check the
result. Every limit below was chosen on rendered scenes, clean and damaged (tests/quality/test_score.py), not on the
model.

Shapes: T frames, H W pixels. Pictures are float32 in [0, 1].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from wan_tpu.media.image import to_uint8
from wan_tpu.media.sheet import contact_sheet, frame_label, spread_evenly

from .scenes import (
    AREAS,
    COLOURS,
    FPS,
    KINDS,
    SHAPES,
    Scene,
    Thing,
    background,
    clip_times,
    coverage,
    first_frame,
    opposite,
    path,
    render,
)

_LEAST_SHARE = 0.35  # A thing counts in pixels of which it covers at least this share; noise of 28 dB stays below it.
_LARGEST_MISMATCH = 0.3  # The largest distance of a pixel from the best mixture of background and colour.
_GATE = 1.9  # Pixels further from a thing than this many radii aren't its own; the tips of a star are at 1.3.


@dataclass(frozen=True)
class Track:
    """Where a thing is in each frame.

    Attributes:
        states: x and y of the centre and the radius in pixels, float64 [T, 3]; those of the previous frame if the thing
            isn't seen.
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
    """Return the share of each colour in each pixel, by the colour's name; float32 [T, H, W] in [0, 1].

    A pixel is modelled as a mixture of the scene's background and one colour, the one with the smallest residual.
    """
    still = background(scene) / 255
    apart = frames - still
    parts, left_over = [], []
    for colour in COLOURS.values():
        direction = np.asarray(colour, np.float32) / 255 - still
        part = np.clip((apart * direction).sum(-1) / (direction * direction).sum(-1), 0, 1)
        parts.append(part)
        left_over.append(np.linalg.norm(apart - part[..., None] * direction, axis=-1))
    best = np.argmin(left_over, axis=0)
    clear = np.min(left_over, axis=0) < _LARGEST_MISMATCH
    return {
        name: np.where((best == i) & clear & (parts[i] > _LEAST_SHARE), parts[i], 0) for i, name in enumerate(COLOURS)
    }


def follow(thing: Thing, share: np.ndarray) -> Track:
    """Follow a thing from its first position; `share` [T, H, W] is that of its colour in each pixel."""
    states, seen = [], []
    x, y, radius = thing.x, thing.y, thing.radius
    for weights in share:
        blob = _locate(weights, x, y, radius, thing.shape)
        # Things shrink to half their radius and grow to 1.8 times; a part may also be hidden or blurred.
        plausible = blob is not None and 0.4 * thing.radius < blob[2] < 2.5 * thing.radius
        if blob is not None and plausible:
            x, y, radius = blob
        seen.append(plausible)
        states.append((x, y, radius))
    return Track(np.array(states), np.array(seen))


def _locate(weights: np.ndarray, x: float, y: float, radius: float, shape: str) -> tuple[float, float, float] | None:
    """Return the centre and radius of a blob of weights [H, W], first from all, then from those near its centre."""
    rows, columns = np.mgrid[: weights.shape[0], : weights.shape[1]] + 0.5
    # Pixels near the previous place count more, so that strays of the colour elsewhere don't drag the first guess away.
    near = weights / (1 + (np.hypot(columns - x, rows - y) / (3 * radius)) ** 2)
    for _ in range(3):
        total = near.sum()
        if total < 4:  # Pixels: a tenth of the smallest thing.
            return None
        x, y = float((near * columns).sum() / total), float((near * rows).sum() / total)
        size = float(np.sqrt(total / AREAS[shape]))
        near = np.where(np.hypot(columns - x, rows - y) < _GATE * max(size, radius), weights, 0)
    size = float(np.sqrt(near.sum() / AREAS[shape]))
    return x, y, size


def outline(share: np.ndarray, state: np.ndarray) -> str:
    """Return the shape that, at any angle, best fits one frame's share [H, W] at a state (x, y, radius)."""
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
    """Return how much the still part differs from that of the first frame: the root mean square of the worst frame.

    Pixels that no thing covers in either frame are compared, after smoothing.
    """
    softer = smooth(smooth(frames))
    foreground = np.sum(list(shares(softer, scene).values()), axis=0) > 0
    spread = smooth(np.repeat(foreground[..., None], 3, -1).astype(np.float32))[..., 0] > 0
    if spread[0].mean() > 0.9:
        return 1.0
    changes = []
    for frame, covered in zip(softer[1:], spread[1:], strict=True):
        free = ~(covered | spread[0])
        # A picture that is mostly not background isn't steady.
        changes.append(np.sqrt(np.square(frame - softer[0])[free].mean()) if free.mean() > 0.3 else 1.0)
    return float(np.max(changes))


LEAST_FIRST_FRAME_DB = 24.0
_LEAST_SEEN = 0.8  # The least share of frames in which a thing is found, because others may pass in front of it.
# The least share of the requested motion. Without any motion it is up to 0.25 where a thing should grow, because things
# grow by more than they shrink.
_LEAST_AMPLITUDE = 0.35
_SPEEDS = (0.0, 0.25, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0)
_RIGHT_SPEEDS = (0.7, 1.4)
_STEADY = 0.03  # The largest change of the background: 8 of 255, twice what noise of 28 dB leaves after smoothing.
_MAX_MOVE = 3.0  # The most pixels by which a thing that stands still may move: half its radius.


@dataclass(frozen=True)
class Score:
    """The verdicts about one clip, with the figures that they are based on.

    Attributes:
        first_frame, colour, outline, direction, kind, speed, steady: Whether each is right.
        first_frame_db: PSNR of the first frame against the request's picture.
        likeness_db: PSNR against the rendered clip, which a flawless model would make.
        amplitude: The amplitude of the motion relative to the requested one: 0 without motion, -1 the other way.
        kind_seen: The kind and direction with the nearest path, such as ("roll", 1).
        speed_seen: The speed relative to the requested one.
        change: How much the background changes (`still_part`).
    """

    first_frame: bool
    colour: bool
    outline: bool
    direction: bool
    kind: bool
    speed: bool
    steady: bool
    first_frame_db: float
    likeness_db: float
    amplitude: float
    kind_seen: tuple[str, int]
    speed_seen: float
    change: float

    @property
    def whole(self) -> float:
        """The share of the sub-scores that are right."""
        return float(np.mean([getattr(self, name) for name in SUB_SCORES]))


SUB_SCORES = tuple(field.name for field in fields(Score) if field.type is bool)


def psnr(clip: np.ndarray, other: np.ndarray) -> float:
    """Return the peak signal to noise ratio of pictures in [0, 1], in dB; at most 99."""
    error = float(np.mean((clip.astype(np.float64) - other) ** 2))
    return min(99.0, -10 * math.log10(max(error, 1e-12)))


def score(frames: np.ndarray, scene: Scene) -> Score:
    """Score frames, float32 [T, H, W, 3] in [0, 1] or uint8, against what `scene` asks for."""
    if frames.dtype == np.uint8:
        frames = frames.astype(np.float32) / 255
    seen = shares(smooth(frames), scene)
    actor = follow(scene.actor, seen[scene.actor.colour])
    first = psnr(frames[0], first_frame(scene) / 255)
    amplitude, kind_seen, speed_seen = _motion(actor, scene)
    change = still_part(frames, scene)
    others_stand = all(_stands_still(follow(thing, seen[thing.colour])) for thing in scene.bystanders)
    return Score(
        first_frame=bool(first >= LEAST_FIRST_FRAME_DB),
        colour=bool(actor.seen.mean() >= _LEAST_SEEN),
        outline=_outline_right(seen[scene.actor.colour], actor, scene),
        direction=bool(amplitude >= _LEAST_AMPLITUDE),
        kind=kind_seen[0] == scene.kind,
        speed=bool(_RIGHT_SPEEDS[0] <= speed_seen <= _RIGHT_SPEEDS[1]),
        steady=bool(change <= _STEADY and others_stand),
        first_frame_db=first,
        likeness_db=psnr(frames, render(scene, clip_times(len(frames))) / 255),
        amplitude=amplitude,
        kind_seen=kind_seen,
        speed_seen=speed_seen,
        change=change,
    )


def _moves(scene: Scene, times: np.ndarray) -> np.ndarray:
    """Return how far x, y and radius are from those of the first frame; float64 [T, 3].

    The radius counts twice, because a thing that grows changes it by only a few pixels.
    """
    states = path(scene, times)[:, :3]
    return (states - states[0]) * (1, 1, 2)


def _motion(actor: Track, scene: Scene) -> tuple[float, tuple[str, int], float]:
    """Return the amplitude of the requested motion, the nearest kind and direction, and the nearest speed."""
    times = clip_times(len(actor.states))
    if not actor.seen.any():
        return 0.0, ("nothing", 0), 0.0
    got = (actor.states - actor.states[0]) * (1, 1, 2)
    # What both directions share, such as a bounce's height, doesn't tell them apart.
    right_way, other_way = _moves(scene, times), _moves(opposite(scene), times)
    shared, distinct = (right_way + other_way) / 2, (right_way - other_way) / 2
    amplitude = float(((got - shared) * distinct).sum() / (distinct * distinct).sum())
    candidates: dict[tuple[str, int], np.ndarray] = {("nothing", 0): np.zeros_like(got)}
    for kind in KINDS:
        if kind != "orbit" or scene.bystanders:
            for direction in (-1, 1):
                candidates[kind, direction] = _moves(replace(scene, kind=kind, direction=direction), times)
    kind_seen = min(candidates, key=lambda name: _distance(got, candidates[name], actor))
    speed = min(_SPEEDS, key=lambda speed: _distance(got, _moves(scene, times * speed), actor))
    return amplitude, kind_seen, speed


def _distance(got: np.ndarray, expected: np.ndarray, actor: Track) -> float:
    return float(np.mean(np.linalg.norm((got - expected)[actor.seen], axis=-1)))


def _stands_still(track: Track) -> bool:
    if track.seen.mean() < _LEAST_SEEN:
        return False
    distances = np.hypot(*(track.states[track.seen] - track.states[track.seen][0])[:, :2].T)
    return bool(np.median(distances) <= _MAX_MOVE)


def _outline_right(share: np.ndarray, actor: Track, scene: Scene) -> bool:
    """Return whether most of five frames show the requested shape."""
    looked_at = np.linspace(0, len(share) - 1, 5).round().astype(int)
    right = [bool(actor.seen[i]) and outline(share[i], actor.states[i]) == scene.actor.shape for i in looked_at]
    return sum(right) >= 3


_SHOWN_FRAMES = 9  # Frames of 17.
_LINE = 28


def save_rows(file: Path, clips: Sequence[np.ndarray], titles: Sequence[str] | None = None) -> None:
    """Draw clips below each other, uint8 or float in [0, 1], [T, H, W, 3]; every other frame is shown."""
    rows = [_row(clip) for clip in clips]
    head = _LINE if titles else 0
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height + head for row in rows)), "white")
    draw = ImageDraw.Draw(sheet)
    y = 0
    for i, row in enumerate(rows):
        if titles:
            draw.text((8, y + 8), titles[i], fill="black", font_size=18)
        sheet.paste(row, (0, y + head))
        y += row.height + head
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)


def _row(clip: np.ndarray) -> Image.Image:
    frames = clip if clip.dtype == np.uint8 else to_uint8(np.clip(clip, 0, 1))
    indices = spread_evenly(len(frames), _SHOWN_FRAMES)
    return contact_sheet(
        [Image.fromarray(frames[i]) for i in indices], [frame_label(i, FPS) for i in indices], columns=_SHOWN_FRAMES
    )
