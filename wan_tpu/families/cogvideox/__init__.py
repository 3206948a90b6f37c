"""CogVideoX and CogVideoX 1.5."""

from wan_tpu.families.cogvideox.published import PUBLISHED
from wan_tpu.families.cogvideox.spec import CogVideoXSpec
from wan_tpu.families.family import Family

FAMILY = Family(
    name="cogvideox",
    title="CogVideoX and CogVideoX 1.5",
    example="THUDM/CogVideoX1.5-5B",
    transformer="CogVideoXTransformer3DModel",
    published=PUBLISHED,
    spec=CogVideoXSpec,
    model="wan_tpu.families.cogvideox.model:CogVideoXModel",
    small="wan_tpu.families.cogvideox.small:make_checkpoint",
)
