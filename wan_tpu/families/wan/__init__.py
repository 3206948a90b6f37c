"""Wan 2.1 and 2.2."""

from wan_tpu.families.family import Family
from wan_tpu.families.wan.published import HUB_IDS, PUBLISHED
from wan_tpu.families.wan.spec import WanSpec

FAMILY = Family(
    name="wan",
    title="Wan 2.1 and 2.2",
    transformer="WanTransformer3DModel",
    published=PUBLISHED,
    hub_ids=HUB_IDS,
    spec=WanSpec,
    model="wan_tpu.families.wan.model:WanModel",
    small="wan_tpu.families.wan.small:make_checkpoint",
    with_experts="wan_tpu.families.wan.distilled:WithExperts",
)
