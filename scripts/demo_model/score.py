"""Say what is right about a clip: first frame, colour, outline, direction, kind and speed of motion, background.

Every limit below was chosen on rendered scenes, clean and damaged (tests/quality/test_score.py), not on the model.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from .scenes import KINDS, Scene, clip_times, first_frame, opposite, path, render
from .tracking import Track, follow, outline, shares, smooth, still_part

LEAST_FIRST_FRAME_DB = 24.0
_SEEN = 0.8  # of the frames a thing must be found in: others may pass in front of it
_LEAST_AMPLITUDE = (
    0.35  # of the motion that was asked for: what stands still has up to 0.25, where one grows more than it shrinks
)
_SPEEDS = (0.0, 0.25, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0)
_RIGHT_SPEEDS = (0.7, 1.4)
_STEADY = 0.03  # change of the background: 8 of 255, twice what noise of 28 dB leaves after smoothing
_OTHERS_MOVE = 3.0  # pixels that what stands still may be off: half its radius


@dataclass(frozen=True)
class Score:
    """What is right about one clip; beside it the figures that say so.

    kind_seen        the kind and direction whose path is nearest, such as ("roll", 1)
    likeness_db      PSNR against the clip as it is rendered: what a flawless model would make
    amplitude        of the asked motion: 1 as asked, 0 still, -1 the other way
    speed_seen       1 as asked, 2 twice as fast
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
    stands = all(_stands(follow(thing, seen[thing.colour])) for thing in scene.others)
    return Score(
        first_frame=bool(first >= LEAST_FIRST_FRAME_DB),
        colour=bool(actor.seen.mean() >= _SEEN),
        outline=_outline_right(seen[scene.actor.colour], actor, scene),
        direction=bool(amplitude >= _LEAST_AMPLITUDE),
        kind=kind_seen[0] == scene.kind,
        speed=bool(_RIGHT_SPEEDS[0] <= speed_seen <= _RIGHT_SPEEDS[1]),
        steady=bool(change <= _STEADY and stands),
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
    """Return the amplitude of the asked motion, the nearest kind and direction, and the nearest speed."""
    times = clip_times(len(actor.states))
    if not actor.seen.any():
        return 0.0, ("nothing", 0), 0.0
    got = (actor.states - actor.states[0]) * (1, 1, 2)
    # What both directions share, such as a bounce's height, says nothing about which of them it is.
    right_way, other_way = _moves(scene, times), _moves(opposite(scene), times)
    shared, own = (right_way + other_way) / 2, (right_way - other_way) / 2
    amplitude = float(((got - shared) * own).sum() / (own * own).sum())
    candidates: dict[tuple[str, int], np.ndarray] = {("nothing", 0): np.zeros_like(got)}
    for kind in KINDS:
        if kind != "orbit" or scene.others:
            for direction in (-1, 1):
                candidates[kind, direction] = _moves(replace(scene, kind=kind, direction=direction), times)
    kind_seen = min(candidates, key=lambda name: _distance(got, candidates[name], actor))
    speed = min(_SPEEDS, key=lambda speed: _distance(got, _moves(scene, times * speed), actor))
    return amplitude, kind_seen, speed


def _distance(got: np.ndarray, expected: np.ndarray, actor: Track) -> float:
    return float(np.mean(np.linalg.norm((got - expected)[actor.seen], axis=-1)))


def _stands(track: Track) -> bool:
    if track.seen.mean() < _SEEN:
        return False
    distances = np.hypot(*(track.states[track.seen] - track.states[track.seen][0])[:, :2].T)
    return bool(np.median(distances) <= _OTHERS_MOVE)


def _outline_right(share: np.ndarray, actor: Track, scene: Scene) -> bool:
    """Whether most of five frames show the shape that was asked for."""
    looked_at = np.linspace(0, len(share) - 1, 5).round().astype(int)
    right = [bool(actor.seen[i]) and outline(share[i], actor.states[i]) == scene.actor.shape for i in looked_at]
    return sum(right) >= 3
