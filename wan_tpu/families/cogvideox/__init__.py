"""CogVideoX and CogVideoX 1.5."""

from wan_tpu.families.cogvideox.published import HUB_IDS, PUBLISHED
from wan_tpu.families.cogvideox.spec import CogVideoXSpec
from wan_tpu.families.family import Family

FAMILY = Family(
    name="cogvideox",
    title="CogVideoX and CogVideoX 1.5",
    transformer="CogVideoXTransformer3DModel",
    published=PUBLISHED,
    hub_ids=HUB_IDS,
    spec=CogVideoXSpec,
    model="wan_tpu.families.cogvideox.model:CogVideoXModel",
    small="wan_tpu.families.cogvideox.small:make_checkpoint",
)
