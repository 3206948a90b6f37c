"""Helios: a video is made chunk after chunk, each conditioned on the frames before it."""

from wan_tpu.families.family import Family
from wan_tpu.families.helios.published import HUB_IDS, PUBLISHED
from wan_tpu.families.helios.spec import HeliosSpec

FAMILY = Family(
    name="helios",
    title="Helios",
    transformer="HeliosTransformer3DModel",
    published=PUBLISHED,
    hub_ids=HUB_IDS,
    spec=HeliosSpec,
    model="wan_tpu.families.helios.model:HeliosModel",
    small="wan_tpu.families.helios.small:make_checkpoint",
)
