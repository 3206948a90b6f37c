"""The torch modules of a HunyuanVideo-1.5 model: how each is built, adapted, scanned and sharded."""

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from jax.sharding import Mesh

from wan_tpu.families.hunyuan15 import vae
from wan_tpu.families.hunyuan15.presets import HunyuanConfig
from wan_tpu.families.shared.convolutions import lay_out
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule

_WHOLE = (Rule(r".*", ()),)  # the VAE, 1.26 G parameters: a copy of a half on every device


def vae_half(config: HunyuanConfig, dropped: str) -> Component:
    """Return the VAE without the half named in `dropped`."""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        delattr(module, dropped)
        lay_out(module, vae.CHANGES)

    return Component(
        folder="vae",
        build=lambda: AutoencoderKLHunyuanVideo15.from_config(config.vae),
        adapt=adapt,
        scanned=(),
        rules=_WHOLE,
        changes=vae.CHANGES,
    )
