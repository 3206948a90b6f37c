"""The torch modules of a Helios model, and how each is built, adapted, scanned and sharded."""

import functools
from collections.abc import Mapping
from typing import Any

from diffusers import AutoencoderKLWan, HeliosTransformer3DModel
from jax.sharding import Mesh

from wan_tpu.families.helios.published import HeliosConfig
from wan_tpu.families.shared.convolutions import vae_component
from wan_tpu.families.shared.t5 import text_encoder
from wan_tpu.families.shared.tokens import half_split
from wan_tpu.families.wan import vae
from wan_tpu.families.wan.components import ORIGINALS
from wan_tpu.families.wan.transformer import MATRICES, RULES
from wan_tpu.plan import DECODER
from wan_tpu.runtime.components import Component


def components(config: HeliosConfig) -> dict[str, Component]:
    """Return every component, by the name of its role; the checkpoint's "vae" serves two."""

    def vae_half(*dropped: str) -> Component:
        return vae_component(lambda: AutoencoderKLWan.from_config(config.vae), vae.CHANGES, dropped)

    return {
        "text_encoder": text_encoder(config.text_encoder_class, config.text_encoder),
        "vae_encoder": vae_half("decoder", "post_quant_conv"),
        "denoise": transformer(config),
        DECODER: vae_half("encoder", "quant_conv"),
    }


def transformer(config: HeliosConfig) -> Component:
    paired = functools.partial(half_split, config.transformer["num_attention_heads"])

    def drop_angles(module: Any, mesh: Mesh) -> None:
        del module.rope  # `positions.rotary_tables` computes them on the host.

    return Component(
        folder="transformer",
        build=lambda: _build(config.transformer),
        adapt=drop_angles,
        scanned=("blocks",),
        rules=RULES,
        float32=(*HeliosTransformer3DModel._keep_in_fp32_modules, "history_gain"),
        renames=((r"\.history_key_scale$", ".history_gain"),),
        changes=((r"blocks\.\*\.attn1\.(to|norm)_[qk]\.(weight|bias)", paired),),
        originals=(*ORIGINALS, (r"^norm_out\.scale_shift_table$", "head.modulation")),
        matrices=MATRICES,
        logits=True,
    )


def _build(settings: Mapping[str, Any]) -> HeliosTransformer3DModel:
    """Return diffusers' module, renaming a weight whose suffix would mean the scales of an 8-bit weight."""
    module = HeliosTransformer3DModel.from_config(settings)
    if settings["is_amplify_history"]:
        for block in module.blocks:
            block.attn1.history_gain = block.attn1.history_key_scale
            del block.attn1.history_key_scale
    return module
