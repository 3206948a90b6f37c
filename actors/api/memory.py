"""Which sizes fit the memory of a layout's slices, from a table of programs that were compiled for such slices.

`scripts/memory_table.py` writes the table, memory.json. What a program needs beside its weights grows with the tokens
(experts) or with the pixels of a frame (VAE) in a straight line, near enough: of a denoising step on v6e-8 the line
through 480x832 and 720x1280, 81 frames, gives 2.4 % more than was compiled for 161 frames.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from actors.pools import BESIDE
from actors.settings import About
from actors.stepping import HELD_STILL
from cluster.layout import Pool
from wan_tpu.expert import TOGETHER
from wan_tpu.request import FRAME_STRIDE

log = logging.getLogger(__name__)

Size = tuple[int, int, int]  # height, width, frames
TABLE = Path(__file__).parent / "memory.json"
MARGIN = 0.1  # of a device's memory is kept free: what fragments, and what the compiler doesn't count
FURTHEST = 4.0  # times the largest size that was compiled: the line is trusted no further
_PROGRAMS = {
    "encoder": ("text_encoder", "vae_encoder later"),
    "denoise_high": ("denoise step",),
    "denoise_low": ("denoise step",),
    "decoder": ("decoder later",),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A person has said which sizes fit."""

    largest: tuple[Size, ...]

    def fits(self, size: Size) -> bool:
        """Whether one of them needs no less: tokens for the experts, pixels of a frame for the VAE."""
        return any(volume(size) <= volume(one) and frame(size) <= frame(one) for one in self.largest)


@dataclasses.dataclass(frozen=True)
class Straight:
    """A line: GiB a device at a size of 0, and for each unit more."""

    start: float
    slope: float

    def at(self, size: float) -> float:
        """Return the GiB."""
        return self.start + self.slope * size


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolMemory:
    """A pool's slice, GiB a device.

    weights  of all its stages; room  of the device, without the margin
    held     what `requests` at a time hold between their steps, each, by volume
    steps    what the experts' program needs besides, by volume; frames  the VAE's and text encoder's, by frame
    most_volume, most_frame  beyond which nothing is known
    """

    pool: str
    room: float
    weights: float
    requests: int
    held: Straight
    steps: tuple[Straight, ...]
    frames: tuple[Straight, ...]
    most_volume: float
    most_frame: float

    def fits(self, size: Size) -> bool:
        """Whether the neediest program fits beside the weights and what requests hold."""
        if volume(size) > self.most_volume or frame(size) > self.most_frame:
            return False
        needs = [line.at(volume(size)) for line in self.steps] + [line.at(frame(size)) for line in self.frames]
        return self.weights + self.requests * self.held.at(volume(size)) + max(needs) <= self.room


@dataclasses.dataclass(frozen=True)
class Memory:
    """All pools of a layout."""

    pools: tuple[PoolMemory, ...]

    def fits(self, size: Size) -> bool:
        """Whether it fits every pool."""
        return all(pool.fits(size) for pool in self.pools)


def volume(size: Size) -> int:
    """Return pixels over the latent frames: what the number of tokens grows with."""
    return frame(size) * ((size[2] - 1) // FRAME_STRIDE + 1)


def frame(size: Size) -> int:
    """Return the pixels of a frame."""
    return size[0] * size[1]


def derived(about: About) -> Memory | None:
    """Return what the slices of a layout have memory for; None, with a warning that names --largest, if unknown.

    CPU devices that stand for chips have no such memory: None, and nothing to warn of.
    """
    if about.layout.emulated or about.settings.chips != "real":
        return None
    table = json.loads(TABLE.read_text())["programs"]
    model = Path(about.settings.checkpoint).name.lower().removesuffix("-diffusers")
    known = [row for row in table if (row["model"], row["dtype"]) == (model, about.settings.dtype)]
    found = [(pool, _pool(pool, known)) for pool in about.layout.pools]
    if missing := [f"{pool.name} ({pool.slice})" for pool, memory in found if memory is None]:
        log.warning(
            "nothing is known of the memory that %s in %s needs on %s: requests of any size are let in; "
            "give --largest HEIGHT*WIDTH*FRAMES (scripts/plan.py says what fits)",
            model,
            about.settings.dtype,
            ", ".join(missing),
        )
        return None
    return Memory(tuple(memory for _, memory in found if memory is not None))


def _pool(pool: Pool, known: Iterable[dict[str, Any]]) -> PoolMemory | None:
    """Return a pool's memory, None when a program of its stages isn't in the table for its slice and mesh."""
    rows = [row for row in known if row["slice"] == pool.slice.name and _same_mesh(row["mesh"], pool.mesh)]
    by_program = {name: [r for r in rows if r["program"] == name] for stage in pool.stages for name in _PROGRAMS[stage]}
    if not all(by_program.values()):
        return None
    weights = sum(by_program[name][0]["weights"] for stage in pool.stages for name in _PROGRAMS[stage])
    steps = by_program.get("denoise step", [])
    held = _line([(_volume(r), r["request"]) for r in steps])
    others = [rows for name, rows in by_program.items() if name != "denoise step"]
    chip = pool.slice.chip
    return PoolMemory(
        pool=pool.name,
        room=chip.hbm_gib / chip.devices * (1 - MARGIN),
        weights=weights,
        requests=pool.batch + BESIDE + HELD_STILL if set(pool.stages) & set(TOGETHER) else 0,
        held=held,
        # A step's own request is among those that are held.
        steps=(_line([(_volume(r), r["other"] - r["request"]) for r in steps]),) if steps else (),
        frames=tuple(_line([(_frame(r), r["other"]) for r in rows]) for rows in others),
        most_volume=FURTHEST * max(map(_volume, steps), default=float("inf")),
        most_frame=FURTHEST * max((_frame(r) for rows in others for r in rows), default=float("inf")),
    )


def _same_mesh(known: Sequence[int], given: Sequence[int | None]) -> bool:
    """Whether axes that were given are those of the table; the table's are what is chosen for those left out."""
    return all(size in (None, other) for size, other in zip(given, known, strict=True))


def _line(points: Sequence[tuple[float, float]]) -> Straight:
    """Return the line through the first and the last of (size, GiB) by size; a level one where there is one point."""
    if not points:
        return Straight(0.0, 0.0)
    (x0, y0), (x1, y1) = min(points), max(points)
    slope = 0.0 if x0 == x1 else (y1 - y0) / (x1 - x0)
    return Straight(y0 - slope * x0, slope)


def _volume(row: dict[str, Any]) -> float:
    return volume((row["height"], row["width"], row["frames"]))


def _frame(row: dict[str, Any]) -> float:
    return frame((row["height"], row["width"], row["frames"]))
