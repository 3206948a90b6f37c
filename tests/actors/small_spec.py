"""Specs for tests that need no weights: what their models make is small, from a text or a picture."""

import dataclasses
from typing import ClassVar

from wan_tpu.families.wan.published import PUBLISHED
from wan_tpu.families.wan.spec import WanSpec
from wan_tpu.request import Defaults
from wan_tpu.tail import Overlap

DEFAULTS = Defaults(
    height=64, width=96, frames=9, fps=16, steps=4, guidance_scale=3.5, guidance_scale_2=3.0, shift=5.0, solver="unipc"
)


class SmallSpec(WanSpec):
    """A real model's spec with small defaults, which takes images or none."""

    tasks = ("t2v", "i2v")
    defaults = DEFAULTS


SPEC = SmallSpec(PUBLISHED["wan2.2-t2v-a14b"])


class SoundSpec(SmallSpec):
    """A spec of a model whose videos have sound, and 17n + 5 frames."""

    frame_step = 17
    frame_offset = 5
    audio_rate = 24000
    defaults = dataclasses.replace(DEFAULTS, frames=22, generate_audio=True)


SOUND_SPEC = SoundSpec(PUBLISHED["wan2.2-t2v-a14b"])


class MotionSpec(SoundSpec):
    """A spec of a model that continues a video with its motion and its sound, and takes references."""

    overlap = Overlap(frames=22, latents=2, blended=5)
    follows_sound = True
    reference_counts: ClassVar = {"image": 2, "audio": 1}
    most_references = 2
    defaults = dataclasses.replace(SoundSpec.defaults, frames=39, fps=24)

    def fit_reference(self, request, kind, size):
        """Return an image's own size."""
        return size


MOTION_SPEC = MotionSpec(PUBLISHED["wan2.2-t2v-a14b"])
