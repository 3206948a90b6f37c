"""Clips of the small model, right ones and mistaken ones: made in a process of their own, whose programs are optimised.

Those of all other tests aren't, which run once or twice; here each runs more than a thousand times.
"""

import dataclasses
from pathlib import Path

from scripts.demo_model import gate
from scripts.demo_model.generators import WAYS
from scripts.demo_model.mistakes import MISTAKES, load_mistaken

STEPS = 8  # docs/quality.md has what all twenty make; of a hundred requests a quarter costs 0.2 dB and no score


def make_clips(
    checkpoint: Path, count: int, mistake: str | None = None, folder: Path | None = None
) -> list[gate.ScoredClip]:
    """Make so many held-out requests; with a mistake, whose copy of the model goes into the folder."""
    scenes = gate.held_out_scenes(count, width=64)
    if mistake is None:
        with WAYS["process"](checkpoint, "float32") as generate:
            return gate.make_clips(generate, scenes, gate.Sampling(steps=STEPS))
    assert folder is not None
    sampling = dataclasses.replace(MISTAKES[mistake].sampling, steps=STEPS)
    return gate.make_clips(load_mistaken(MISTAKES[mistake], checkpoint, folder), scenes, sampling)
