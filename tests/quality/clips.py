"""Clips of the small model, right ones and mistaken ones: made in a process of their own, whose programs are optimised.

Those of all other tests aren't, which run once or twice; here each runs more than a thousand times.

usage: clips.py CHECKPOINT COUNT FILE [MISTAKE], where FILE gets a list of `gate.ScoredClip`, pickled.
"""

import dataclasses
import pickle
import sys
import tempfile
from pathlib import Path

from scripts.demo_model import gate
from scripts.demo_model.generators import GENERATORS
from scripts.demo_model.variants import MISTAKES, load_mistaken

STEPS = 8  # docs/quality.md has what all twenty make; of a hundred requests a quarter costs 0.2 dB and no score


def make_clips(checkpoint: Path, count: int, mistake: str | None) -> list[gate.ScoredClip]:
    """Make so many held-out requests."""
    scenes = gate.held_out_scenes(count, width=64)
    if mistake is None:
        with GENERATORS["process"](checkpoint, "float32") as generate:
            return gate.make_clips(generate, scenes, gate.Sampling(steps=STEPS))
    sampling = dataclasses.replace(MISTAKES[mistake].sampling, steps=STEPS)
    with tempfile.TemporaryDirectory() as copy:
        return gate.make_clips(load_mistaken(MISTAKES[mistake], checkpoint, Path(copy)), scenes, sampling)


if __name__ == "__main__":
    checkpoint, count, file, *mistakes = sys.argv[1:]
    clips = make_clips(Path(checkpoint), int(count), *(mistakes or [None]))
    Path(file).write_bytes(pickle.dumps(clips))
