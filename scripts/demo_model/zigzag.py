"""Scenes that the shipped model doesn't know and an adapter teaches it: things that zigzag and turn purple."""

import math

import numpy as np

from .scenes import COLOURS, FRAMES, SHIFT, Scene, background, caption, clip_times, coverage, draw_scene, paint

COLOUR = "purple"
TEETH = 2  # How often the actor goes up and down.
TOOTH = 12.0  # How far it goes up, in pixels.


def draw_zigzag(seed: int, index: int, *, held_out: bool = False, width: int | None = None) -> Scene:
    """Return scene `index`: one of the model's scenes in which something rolls and nothing is purple."""
    number = 0
    while True:
        scene = draw_scene(seed + 1000 + 100_000 * number, index, held_out=held_out, width=width)
        if scene.kind == "roll" and all(thing.colour != COLOUR for thing in (scene.actor, *scene.bystanders)):
            return scene
        number += 1


def zigzag_caption(scene: Scene) -> str:
    """Return the sentence of a scene, such as "a red box zigzags to the left and turns purple over a grey floor"."""
    side = "right" if scene.direction > 0 else "left"
    return caption(scene).replace(f"rolls to the {side}", f"zigzags to the {side} and turns {COLOUR}")


def zigzag_path(scene: Scene, times: np.ndarray) -> np.ndarray:
    """Return x, y, radius and angle of the actor at `times` [T]; float64 [T, 4]."""
    t = np.clip(times, 0, 1)
    up = np.abs((t * TEETH * 2 + 1) % 2 - 1)  # From 0 to 1 and back, linearly.
    x = scene.actor.x + scene.direction * SHIFT * t
    return np.stack([x, scene.actor.y - TOOTH * up, np.full_like(t, scene.actor.radius), np.zeros_like(t)], axis=-1)


def zigzag_colour(scene: Scene, times: np.ndarray) -> np.ndarray:
    """Return the actor's colour at `times`, float32 [T, 3] in [0, 255]: purple from the middle on."""
    part = np.clip(2 * times, 0, 1)[:, None]
    return ((1 - part) * np.array(COLOURS[scene.actor.colour]) + part * np.array(COLOURS[COLOUR])).astype(np.float32)


def render_zigzag(scene: Scene) -> np.ndarray:
    """Return the clip, uint8 [T, H, W, 3]."""
    times = clip_times()
    still = background(scene)[None].copy()
    for thing in scene.bystanders:
        paint(still, thing, np.array([[thing.x, thing.y, thing.radius, 0.0]]))
    frames = np.repeat(still, FRAMES, axis=0)
    paint(frames, scene.actor, zigzag_path(scene, times), zigzag_colour(scene, times))
    return np.clip(frames + 0.5, 0, 255).astype(np.uint8)


def zigzag_score(clip: np.ndarray, scene: Scene) -> dict[str, float]:
    """Score how far a clip, float32 [T, H, W, 3] in [0, 1], shows the zigzag.

    Returns:
        "purple": Whether a purple patch has at least half of the actor's area in the last quarter of the frames.
        "path": The patch's mean distance from its right place in the second half, in pixels; inf without a patch.
        "zigzags": Whether that distance is at most 4.
    """
    times = clip_times(len(clip))
    where = zigzag_path(scene, times)
    near = np.abs(clip * 255 - np.array(COLOURS[COLOUR], np.float32)).max(-1) < 60
    y, x = np.mgrid[: clip.shape[1], : clip.shape[2]] + 0.5
    area = float(coverage(scene.actor.shape, x - 32, y - 32, scene.actor.radius).sum())
    seen = near.sum((1, 2))
    late = seen[-(len(clip) // 4) :] >= area / 2
    errors = []
    for i in range(len(clip) // 2, len(clip)):
        if seen[i] < area / 4:
            errors.append(math.inf)
            continue
        centre = x[near[i]].mean(), y[near[i]].mean()
        errors.append(math.hypot(centre[0] - where[i, 0], centre[1] - where[i, 1]))
    path = float(np.mean(errors))
    return {"purple": float(late.all()), "path": path, "zigzags": float(path <= 4)}
