"""Helios: a video is made chunk after chunk, each conditioned on the frames before it."""

from wan_tpu.families.family import Family
from wan_tpu.families.helios.published import PUBLISHED
from wan_tpu.families.helios.spec import HeliosSpec

FAMILY = Family(
    name="helios",
    title="Helios",
    example="BestWishYsh/Helios-Distilled",
    transformer="HeliosTransformer3DModel",
    published=PUBLISHED,
    spec=HeliosSpec,
    model="wan_tpu.families.helios.model:HeliosModel",
    small="wan_tpu.families.helios.small:make_checkpoint",
)
