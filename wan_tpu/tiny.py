"""Make small, complete checkpoints of every published model from diffusers' and transformers' own classes.

Random weights, real everything else: component classes, configuration keys, file layout, a tokenizer trained on
real sentences. They stand in for 30 to 130 GB downloads in the demo, the tests and the benchmarks. Deterministic: the
same call writes the same bytes.
"""

from pathlib import Path
from typing import Any

from wan_tpu.families import published


def make_checkpoint(folder: Path, kind: str, **changed: Any) -> Path:
    """Write a small checkpoint in the shape of the published model `kind`; changed: as its family's own takes it."""
    family = published()[kind]
    return family.part(family.small)(folder, kind, **changed)
