"""The transformer of an LTX-2 model: how it is built, adapted, scanned and sharded."""

from diffusers import LTX2VideoTransformer3DModel

from wan_tpu.families.ltx2 import transformer as expert
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.runtime.components import Component


def transformer(config: Ltx2Config) -> Component:
    """Return the transformer; its pairs of channels for RoPE are as our kernels have them."""
    return Component(
        folder="transformer",
        build=lambda: LTX2VideoTransformer3DModel.from_config(config.transformer),
        adapt=lambda module, mesh: None,
        scanned=("transformer_blocks",),
        rules=expert.RULES,
        matrices=expert.MATRICES,
    )
