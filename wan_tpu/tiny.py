"""Make small, complete checkpoints of every published model from diffusers' and transformers' own classes.

Their weights are random. Everything else is real: component classes, configuration keys, file layout, a tokenizer
trained on real sentences. They stand in for downloads of 30 to 130 GB in the demo, the tests and the benchmarks, and
are deterministic: the same call writes the same bytes.
"""

from pathlib import Path
from typing import Any

from wan_tpu.families import list_published


def make_checkpoint(folder: Path, kind: str, **changed: Any) -> Path:
    """Write a small checkpoint like the published model `kind`; `changed` goes to the family's own function."""
    family = list_published()[kind]
    return family.part(family.small)(folder, kind, **changed)
