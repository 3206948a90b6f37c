"""LTX-2: video with sound."""

from wan_tpu.families.family import Family
from wan_tpu.families.ltx2.published import HUB_IDS, PUBLISHED
from wan_tpu.families.ltx2.spec import Ltx2Spec

FAMILY = Family(
    name="ltx2",
    title="LTX-2",
    transformer="LTX2VideoTransformer3DModel",
    published=PUBLISHED,
    hub_ids=HUB_IDS,
    spec=Ltx2Spec,
    model="wan_tpu.families.ltx2.model:Ltx2Model",
    small="wan_tpu.families.ltx2.small:make_checkpoint",
    licence="LTX-2 Community License of 2026-01-05, or for LTX-2.5 LTX-2.x Community License of 2026-08-11 "
    "(github.com/Lightricks/LTX-2): applies worldwide; needs a paid "
    "licence from 10 million dollars of yearly revenue (affiliates included); hosted services must pass its "
    "restrictions on to their users; watermarks and provenance data must not be removed",
)
