"""The scorer is right about clips whose truth is known, and each kind of damage lowers the sub-score it is for."""

import functools

import numpy as np
import pytest

from scripts.demo_model import intervals
from scripts.demo_model.scenes import draw_scene, opposite, render
from scripts.demo_model.score import SUB_SCORES, psnr, score, smooth

COUNT = 5
FEW = 3  # enough where all must be right


@functools.cache
def scenes(count=COUNT):
    return [draw_scene(11, i, held_out=True) for i in range(count)]


@functools.cache
def clips(count=COUNT):
    return [render(scene).astype(np.float32) / 255 for scene in scenes(count)]


def shares_after(damage, count=COUNT):
    scores = [score(damage(clip), scene) for clip, scene in zip(clips(count), scenes(count), strict=True)]
    return {name: np.mean([getattr(each, name) for each in scores]) for name in SUB_SCORES}


def noisy(clip, decibel=28.0):
    noise = np.random.default_rng(0).normal(0, 10 ** (-decibel / 20), clip.shape)
    return np.clip(clip + noise, 0, 1).astype(np.float32)


def test_clean_clips_are_right():
    assert set(shares_after(lambda clip: clip, FEW).values()) == {1.0}


@pytest.mark.thorough
def test_noise_of_28_db_changes_nothing():
    assert abs(np.mean([psnr(noisy(clip), clip) for clip in clips()]) - 28) < 0.5
    assert min(shares_after(noisy).values()) >= 0.95


@pytest.mark.thorough
def test_blur_changes_outlines_at_most():
    shares = shares_after(lambda clip: smooth(smooth(clip)))
    assert shares.pop("outline") >= 0.7
    assert min(shares.values()) >= 0.95


DAMAGES = {
    "black": (np.zeros_like, SUB_SCORES),
    "noise": (lambda clip: np.random.default_rng(0).random(clip.shape, np.float32), SUB_SCORES),
    "static": (lambda clip: np.repeat(clip[:1], len(clip), 0), ("direction", "kind", "speed")),
    "twice as fast": (lambda clip: clip[np.minimum(2 * np.arange(len(clip)), len(clip) - 1)], ("speed",)),
    "other colours from the second frame": (
        lambda clip: np.concatenate([clip[:1], clip[1:][..., [1, 2, 0]]]),
        ("colour", "steady"),
    ),
    "drifts sideways": (lambda clip: np.stack([np.roll(f, i, 1) for i, f in enumerate(clip)]), ("steady",)),
    "fades": (lambda clip: clip * np.linspace(1, 0.5, len(clip), dtype=np.float32)[:, None, None, None], ("steady",)),
    "another first frame": (lambda clip: np.concatenate([1 - clip[:1], clip[1:]]), ("first_frame",)),
}


OTHERS = ("noise", "twice as fast", "drifts sideways", "fades")  # Each lowers a sub-score that another damage lowers.


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in OTHERS else ()) for name in DAMAGES]
)
def test_damage_lowers_the_sub_score_it_is_for(name):
    damage, fallen = DAMAGES[name]
    shares = shares_after(damage)
    for sub_score in fallen:
        assert shares[sub_score] <= 0.4, sub_score


def test_the_other_direction_is_seen_and_nothing_else_is_wrong():
    scores = [score(render(opposite(scene)), scene) for scene in scenes(FEW)]
    assert not any(each.direction for each in scores)
    for name in ("first_frame", "colour", "outline", "kind", "steady"):
        assert np.mean([getattr(each, name) for each in scores]) >= 0.95, name


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Wilson's: 85 of 100 is 0.767 to 0.907 (his paper's formula, computed by hand)."""
    known = intervals.share([True] * 85 + [False] * 15)
    assert known.low == pytest.approx(0.767, abs=1e-3)
    assert known.high == pytest.approx(0.907, abs=1e-3)
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        estimate = intervals.share(rng.random(100) < 0.9)
        inside += estimate.low <= 0.9 <= estimate.high
    assert 0.91 <= inside / 300 <= 0.99
    means = [intervals.mean(rng.normal(30, 2, 100)) for _ in range(60)]
    assert np.mean([each.low <= 30 <= each.high for each in means]) >= 0.85
