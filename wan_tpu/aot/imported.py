"""Imports what computes, ahead of time: torch, JAX, diffusers and every family's models. Nothing of Ray's."""

import wan_tpu.aot.programs
import wan_tpu.media.mp4  # noqa: F401
from wan_tpu.families import FAMILIES

for _family in FAMILIES.values():
    _family.part(_family.model)
