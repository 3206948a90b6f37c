"""The torch modules of a CogVideoX model, and how each is built, adapted, scanned and sharded."""

import functools
from typing import Any

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from jax.sharding import Mesh

from wan_tpu.families.cogvideox import transformer as expert
from wan_tpu.families.cogvideox import vae
from wan_tpu.families.cogvideox.published import CogVideoXConfig
from wan_tpu.families.shared.convolutions import vae_component
from wan_tpu.families.shared.tokens import half_split
from wan_tpu.runtime.components import Component


def transformer(config: CogVideoXConfig) -> Component:
    heads = config.transformer["num_attention_heads"]
    rotary = config.transformer["use_rotary_positional_embeddings"]
    projections = r"transformer_blocks\.\*\.attn1\.to_[qk]\.(weight|bias)"
    norms = r"transformer_blocks\.\*\.attn1\.norm_[qk]\.(weight|bias)"  # These are per head.
    return Component(
        folder="transformer",
        build=lambda: CogVideoXTransformer3DModel.from_config(config.transformer),
        adapt=_adapt,
        scanned=("transformer_blocks",),
        rules=expert.RULES,
        matrices=expert.MATRICES,
        logits=True,
        changes=(
            ((projections, functools.partial(half_split, heads)), (norms, functools.partial(half_split, 1)))
            if rotary
            else ()
        ),
    )


def _adapt(module: torch.nn.Module, mesh: Mesh) -> None:
    """Drop the table of sines, which is computed for each size."""
    config: Any = module.config
    if not config.use_learned_positional_embeddings and not config.use_rotary_positional_embeddings:
        del module.get_submodule("patch_embed").pos_embedding


def vae_half(config: CogVideoXConfig, dropped: str) -> Component:
    """Return the VAE without the half named in `dropped`."""
    return vae_component(lambda: AutoencoderKLCogVideoX.from_config(config.vae), vae.CHANGES, (dropped,))
