"""MiniMax-H3: video with sound."""

from wan_tpu.families.family import Family
from wan_tpu.families.minimax_h3.published import HUB_IDS, PUBLISHED
from wan_tpu.families.minimax_h3.spec import MiniMaxH3Spec

FAMILY = Family(
    name="minimax_h3",
    title="MiniMax-H3",
    transformer="MiniMaxH3Transformer3DModel",
    published=PUBLISHED,
    hub_ids=HUB_IDS,
    spec=MiniMaxH3Spec,
    model="wan_tpu.families.minimax_h3.model:MiniMaxH3Model",
    small="wan_tpu.families.minimax_h3.small:make_checkpoint",
    licence="MiniMax-H3 Community License of 2026-08-02 (huggingface.co/MiniMaxAI/MiniMax-H3): not for use in the EU, "
    "the UK, South Korea or the USA, where a separate licence is needed; above 20 million dollars of yearly revenue "
    'authorisation comes first; commercial user interfaces show the name "MiniMax H3"; hosted services need safeguards '
    "and a way to report abuse; outputs may not train other models",
    display_name="MiniMax H3",
)
