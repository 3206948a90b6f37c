"""HunyuanVideo-1.5."""

from wan_tpu.families.family import Family
from wan_tpu.families.hunyuan15.published import HUB_IDS, PUBLISHED
from wan_tpu.families.hunyuan15.spec import HunyuanSpec

FAMILY = Family(
    name="hunyuan15",
    title="HunyuanVideo-1.5",
    transformer="HunyuanVideo15Transformer3DModel",
    published=PUBLISHED,
    hub_ids=HUB_IDS,
    spec=HunyuanSpec,
    model="wan_tpu.families.hunyuan15.model:HunyuanModel",
    small="wan_tpu.families.hunyuan15.small:make_checkpoint",
)
