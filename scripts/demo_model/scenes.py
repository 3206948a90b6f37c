"""The scenes that the small model learns, and their captions: one to three things on a floor, one of which moves.

Scenes are deterministic: a seed and an index give the same scene on any machine. Only the sentence says how the thing
moves, because both directions of every kind start from the same picture.

Units: pixels (y downwards), angles in radians (clockwise on the screen), t the fraction of the clip that has passed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

FRAMES, FPS = 17, 8
HEIGHT = 64
WIDTHS = (64, 96)

SHAPES = ("ball", "box", "triangle", "star")
# The colours are saturated, so that none is close to a floor's or a sky's.
COLOURS = {
    "red": (215, 35, 40),
    "orange": (250, 135, 10),
    "yellow": (250, 230, 30),
    "green": (10, 140, 50),
    "blue": (35, 60, 215),
    "purple": (125, 30, 175),
    "pink": (255, 105, 185),
    "black": (20, 20, 25),
}
FLOORS = {"green": (135, 175, 125), "brown": (160, 130, 100), "grey": (140, 140, 145)}
SKIES = {"blue": (175, 210, 240), "grey": (195, 198, 202), "pale": (240, 225, 200)}

# Each kind of motion with the words for its two directions, -1 and +1.
KINDS = {
    "roll": ("left", "right"),
    "slide": ("left", "right"),
    "bounce": ("left", "right"),
    "fall": ("up", "down"),
    "orbit": ("counterclockwise", "clockwise"),
    "grow": ("smaller", "larger"),
}

HORIZON = 40
GROUND = 54  # The height at which things stand.
ACTOR_RADIUS, ORBIT_RADIUS, SMALL_RADIUS = 7.0, 17.0, 5.5
SHIFT = 20.0  # Pixels that a roll, a slide or a fall covers: from the middle of 64 to either edge.
HOPS, HOP_LENGTH, HOP_HEIGHT = 2, 16.0, 16.0
TURNS = 0.75
LARGER, SMALLER = 1.8, 0.5

_TRIANGLE_INNER, _BOX_HALF = 0.7, 0.85
_STAR_OUTER, _STAR_INNER = 1.3, 0.65
# The area of a shape of radius one.
AREAS = {
    "ball": math.pi,
    "box": 4 * _BOX_HALF**2,
    "triangle": 3 * math.sqrt(3) * _TRIANGLE_INNER**2,
    "star": 5 * _STAR_OUTER * _STAR_INNER * math.sin(math.pi / 5),
}
_FOOT = {"ball": 1.0, "box": _BOX_HALF, "triangle": _TRIANGLE_INNER, "star": _STAR_OUTER * math.cos(math.pi / 5)}


@dataclass(frozen=True)
class Thing:
    """One thing at its starting point: centre x, y and radius in pixels."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """The content of a clip: what is visible, how the actor moves, and how its sentence is worded.

    Attributes:
        width: The width of the clip.
        floor: The colour of the floor.
        sky: The colour of the sky.
        cloud: The cloud's x.
        actor: The thing that moves.
        kind: The kind of motion, one of `KINDS`.
        direction: -1 or +1, named in `KINDS`.
        bystanders: The things that stand still; in an orbit, the first is its centre.
        wording: The number of the sentence's form.
    """

    width: int
    floor: str
    sky: str
    cloud: float
    actor: Thing
    kind: str
    direction: int
    bystanders: tuple[Thing, ...] = ()
    wording: int = 0

    @property
    def held_out(self) -> bool:
        """Whether colour, shape and kind are a combination that is never trained on, in neither direction."""
        names = (list(COLOURS), self.actor.colour), (list(SHAPES), self.actor.shape), (list(KINDS), self.kind)
        colour, shape, kind = (values.index(value) for values, value in names)
        return (colour + 2 * shape + 3 * kind) % len(COLOURS) == 0  # One colour of every shape and kind.


def opposite(scene: Scene) -> Scene:
    """Return the scene that starts with the same picture and moves the other way."""
    return replace(scene, direction=-scene.direction)


def draw_scene(seed: int, index: int, *, held_out: bool, width: int | None = None) -> Scene:
    """Return scene `index` of the training set or the held-out set; without a `width`, one in four is 96 wide."""
    rng = np.random.default_rng([seed, index, int(held_out)])
    chosen = width or int(rng.choice(WIDTHS, p=(0.75, 0.25)))
    while True:
        scene = _draw(rng, chosen)
        if scene.held_out == held_out:
            return scene


def _draw(rng: np.random.Generator, width: int) -> Scene:
    kind = str(rng.choice(list(KINDS)))
    count = int(rng.choice((0, 1, 2), p=(0.45, 0.4, 0.15)))
    if kind == "orbit":
        count = max(count, 1)
    colours = [str(name) for name in rng.permutation(list(COLOURS))]
    shapes = [str(name) for name in rng.choice(SHAPES, 3)]
    middle = width / 2 + rng.uniform(-5, 5)
    sides = rng.permutation([rng.uniform(9, 14), width - rng.uniform(9, 14)])
    bystanders = [_standing(shapes[i + 1], colours[i + 1], sides[i], HORIZON + 5, SMALL_RADIUS) for i in range(count)]
    actor = _standing(shapes[0], colours[0], middle, GROUND, ACTOR_RADIUS)
    if kind == "fall":
        actor = replace(actor, y=27.0)
    if kind == "orbit":
        centre = replace(bystanders[0], x=middle, y=30.0)
        bystanders[0] = centre
        angle = rng.uniform(0, 2 * math.pi)
        x, y = centre.x + ORBIT_RADIUS * math.cos(angle), centre.y + ORBIT_RADIUS * math.sin(angle)
        actor = replace(actor, x=x, y=y, radius=SMALL_RADIUS)
    return Scene(
        width=width,
        floor=str(rng.choice(list(FLOORS))),
        sky=str(rng.choice(list(SKIES))),
        cloud=rng.uniform(0.1, 0.9) * width,
        actor=actor,
        kind=kind,
        direction=int(rng.choice((-1, 1))),
        bystanders=tuple(bystanders),
        wording=int(rng.integers(4)),
    )


def _standing(shape: str, colour: str, x: float, ground: float, radius: float) -> Thing:
    return Thing(shape, colour, float(x), ground - radius * _FOOT[shape], radius)


def clip_times(frames: int = FRAMES) -> np.ndarray:
    """Return t of each frame, [T] from 0 to 1."""
    return np.linspace(0, 1, frames)


def path(scene: Scene, times: np.ndarray) -> np.ndarray:
    """Return x, y, radius and angle of the actor at `times` [T]; float64 [T, 4]."""
    actor, sign = scene.actor, scene.direction
    t = np.clip(times, 0, 1)
    x, y = np.full_like(t, actor.x), np.full_like(t, actor.y)
    radius, angle = np.full_like(t, actor.radius), np.zeros_like(t)
    if scene.kind == "roll":
        x = x + sign * SHIFT * t
        angle = sign * SHIFT * t / actor.radius
    elif scene.kind == "slide":  # Friction slows it down until it stands.
        x = x + sign * SHIFT * (1 - (1 - t) ** 2)
    elif scene.kind == "bounce":
        x = x + sign * HOP_LENGTH * t
        y = y - HOP_HEIGHT * np.abs(np.sin(HOPS * math.pi * t))
    elif scene.kind == "fall":
        y = y + sign * SHIFT * t**2
    elif scene.kind == "orbit":
        centre = scene.bystanders[0]
        turned = math.atan2(actor.y - centre.y, actor.x - centre.x) + sign * 2 * math.pi * TURNS * t
        x, y = centre.x + ORBIT_RADIUS * np.cos(turned), centre.y + ORBIT_RADIUS * np.sin(turned)
    else:  # It grows, and its foot stays where it is.
        radius = actor.radius * (1 + ((LARGER if sign > 0 else SMALLER) - 1) * t)
        y = y - (radius - actor.radius) * _FOOT[actor.shape]
    return np.stack([x, y, radius, angle], axis=-1)


def coverage(
    shape: str,
    x: np.ndarray,
    y: np.ndarray,
    radius: np.ndarray | float,
    angle: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Return how much of each pixel a shape around the origin covers, in [0, 1]; x, y, radius, angle broadcast."""
    return np.clip(0.5 - _distance(shape, x, y, radius, angle), 0, 1).astype(np.float32)


def _distance(
    shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray | float, angle: np.ndarray | float
) -> np.ndarray:
    """Return the signed distance to the outline in pixels, negative inside."""
    if shape == "ball":
        return np.hypot(x, y) - radius
    cos, sin = np.cos(angle), np.sin(angle)
    u, v = cos * x + sin * y, cos * y - sin * x
    if shape == "box":
        return np.maximum(np.abs(u), np.abs(v)) - _BOX_HALF * radius
    if shape == "triangle":  # It has a tip at the top.
        return np.maximum(v, np.abs(u) * (math.sqrt(3) / 2) - v / 2) - _TRIANGLE_INNER * radius
    # A star is ten mirror images of one edge, from the tip to the notch beside it.
    fifth = 2 * math.pi / 5
    folded = np.abs((np.arctan2(u, -v) + fifth / 2) % fifth - fifth / 2)
    r = np.hypot(u, v)
    run = _STAR_OUTER - _STAR_INNER * math.cos(fifth / 2)
    rise = _STAR_INNER * math.sin(fifth / 2)
    along, across = r * np.cos(folded) - _STAR_OUTER * radius, r * np.sin(folded)
    return (along * rise + across * run) / math.hypot(run, rise)


def background(scene: Scene) -> np.ndarray:
    """Return floor and sky without things, float32 [H, W, 3] in [0, 255].

    Stripes and a cloud reveal a picture that drifts sideways; nothing else would.
    """
    y, x = _grid(scene.width)
    picture = np.empty((HEIGHT, scene.width, 3), np.float32)
    picture[:] = SKIES[scene.sky]
    puffs = [np.hypot((x - scene.cloud - dx) / 9, (y - 9 - dy) / 4) for dx, dy in ((0, 0), (6, 2))]
    cloud = np.clip((1.15 - np.minimum(*puffs)) * 3, 0, 1)[..., None]
    picture += cloud * (np.float32(250) - picture)
    stripes = 1 - 0.12 * (1 + np.sin(2 * math.pi * x / 16))
    floor = np.asarray(FLOORS[scene.floor], np.float32) * stripes[..., None]
    below = np.clip(y - HORIZON + 0.5, 0, 1)[..., None]
    return (picture + below * (floor - picture)).astype(np.float32)


def render(scene: Scene, times: np.ndarray | None = None) -> np.ndarray:
    """Return the frames at `times`, by default all 17 of the clip, uint8 [T, H, W, 3]."""
    states = path(scene, clip_times() if times is None else times)
    still = background(scene)
    for thing in scene.bystanders:
        paint(still[None], thing, np.array([[thing.x, thing.y, thing.radius, 0.0]]))
    frames = np.repeat(still[None], len(states), axis=0)
    paint(frames, scene.actor, states)
    return np.clip(frames + 0.5, 0, 255).astype(np.uint8)


def first_frame(scene: Scene) -> np.ndarray:
    """Return the picture that a request begins with, uint8 [H, W, 3]."""
    return render(scene, np.zeros(1))[0]


def paint(frames: np.ndarray, thing: Thing, states: np.ndarray, colours: np.ndarray | None = None) -> None:
    """Draw a thing over frames [T, H, W, 3] in place; states [T, 4] as from `path`, colours [T, 3] if not its own."""
    y, x = _grid(frames.shape[2])
    cx, cy, radius, angle = (column[:, None, None].astype(np.float32) for column in states.T)
    colour = np.asarray(COLOURS[thing.colour], np.float32) if colours is None else colours[:, None, None]
    covered = coverage(thing.shape, x - cx, y - cy, radius, angle)[..., None]
    frames += covered * (colour - frames)
    if thing.shape == "ball":  # A lighter spot shows how it turns.
        spot_x, spot_y = cx + 0.5 * radius * np.sin(angle), cy - 0.5 * radius * np.cos(angle)
        spot = coverage("ball", x - spot_x, y - spot_y, 0.25 * radius)[..., None]
        frames += spot * 0.5 * (255 - frames)


def _grid(width: int) -> tuple[np.ndarray, np.ndarray]:
    y, x = np.mgrid[:HEIGHT, :width].astype(np.float32) + np.float32(0.5)
    return y, x


_VERBS = {
    "roll": "rolls to the {way}",
    "slide": "slides to the {way}",
    "bounce": "bounces to the {way}",
    "orbit": "circles {centre} {way}",
}
_WORDS = {("fall", -1): "rises up", ("fall", 1): "falls down", ("grow", -1): "shrinks", ("grow", 1): "grows"}


def caption(scene: Scene) -> str:
    """Return the sentence of a scene, such as "a red ball rolls to the right over a green floor"."""
    beside = scene.bystanders[1:] if scene.kind == "orbit" else scene.bystanders
    clause = f"{_noun(scene.actor)} {_verb(scene)}"
    if beside:
        clause += " next to " + " and ".join(_noun(thing) for thing in beside)
    floor, sky = f"over a {scene.floor} floor", f"under a {scene.sky} sky"
    return (
        f"{clause} {floor}",
        f"{clause} {floor} {sky}",
        f"{sky}, {clause}",
        f"{floor}, {clause}",
    )[scene.wording]


def all_words() -> Iterator[str]:
    """Yield every word of the grammar, for a tokenizer, since a sample of captions may lack some."""
    yield from (*SHAPES, *COLOURS, *FLOORS, *SKIES, *(word for pair in KINDS.values() for word in pair))


def _noun(thing: Thing) -> str:
    article = "an" if thing.colour[0] in "aeiou" else "a"
    return f"{article} {thing.colour} {thing.shape}"


def _verb(scene: Scene) -> str:
    fixed = _WORDS.get((scene.kind, scene.direction))
    if fixed:
        return fixed
    centre = _noun(scene.bystanders[0]) if scene.bystanders else ""
    return _VERBS[scene.kind].format(way=KINDS[scene.kind][scene.direction > 0], centre=centre)
