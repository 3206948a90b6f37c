"""The torch modules of a Wan model: how each is built, adapted, scanned and sharded."""

import functools
import re
from typing import Any

import numpy as np
import torch
import transformers
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.families.shared.tokens import half_split
from wan_tpu.families.wan import transformer as expert
from wan_tpu.families.wan import vae
from wan_tpu.families.wan.presets import WanConfig
from wan_tpu.families.wan.text import adapt_text_encoder
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule

# Sharding. One letter a dimension: L scanned layers (always whole), O outputs, I inputs of a projection.
_WHOLE = ()
_COLUMNS = ("tp", None)  # [O, I]: heads, or hidden units, split over 'tp'
_ROWS = (None, "tp")  # [O, I]: the split inputs of the projection that follows; its bias [O] is whole

TEXT_ENCODER_RULES = (
    Rule(r"shared\.weight", _COLUMNS),  # [vocabulary, C]
    Rule(r"encoder\.block\..*\.SelfAttention\.(q|k|v)\.weight", _COLUMNS),
    Rule(r"encoder\.block\..*\.SelfAttention\.o\.weight", _ROWS),
    Rule(r"encoder\.block\..*\.relative_attention_bias\.weight", (None, "tp")),  # [buckets, N]
    Rule(r"encoder\.block\..*\.DenseReluDense\.(wi|wi_0|wi_1)\.weight", _COLUMNS),
    Rule(r"encoder\.block\..*\.DenseReluDense\.wo\.weight", _ROWS),
    Rule(r"encoder\..*layer_norm\.weight", _WHOLE),  # [C]
)
WHOLE_RULES = (Rule(r".*", _WHOLE),)  # CLIP (0.6 G parameters) and the VAE (0.13 to 0.7 G): a copy on every device


def transformer(config: WanConfig, folder: str) -> Component:
    """Return an expert, from the checkpoint's `folder`."""
    paired = functools.partial(half_split, config.transformer["num_attention_heads"])
    return Component(
        folder=folder,
        build=lambda: WanTransformer3DModel.from_config(config.transformer),
        adapt=lambda module, mesh: None,
        scanned=("blocks",),
        rules=expert.RULES,
        float32=tuple(WanTransformer3DModel._keep_in_fp32_modules),
        changes=((r"blocks\.\*\.attn1\.(to|norm)_[qk]\.(weight|bias)", paired),),
    )


def vae_half(config: WanConfig, *dropped: str) -> Component:
    """Return the VAE without the parts named in `dropped`."""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        for part in dropped:
            delattr(module, part)
        for name, parameter in list(module.named_parameters()):
            change = next((change for pattern, change in vae.CHANGES if re.fullmatch(pattern, name)), None)
            if change is not None:
                shape = change(np.broadcast_to(np.float32(0), tuple(parameter.shape))).shape
                parent, _, leaf = name.rpartition(".")
                module.get_submodule(parent).register_parameter(
                    leaf, torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
                )

    return Component(
        folder="vae",
        build=lambda: AutoencoderKLWan.from_config(config.vae),
        adapt=adapt,
        scanned=(),
        rules=WHOLE_RULES,
        changes=vae.CHANGES,
    )


def text_encoder(config: WanConfig) -> Component:
    """Return UMT5 (or T5, whose blocks differ and are not scanned)."""
    kind = getattr(transformers, config.text_encoder_class, None)
    if config.text_encoder_class not in ("UMT5EncoderModel", "T5EncoderModel"):
        raise CheckpointError(f"text encoder {config.text_encoder_class} is not supported; Wan's is UMT5EncoderModel")
    return Component(
        folder="text_encoder",
        build=lambda: _from_transformers(kind, config.text_encoder),
        adapt=adapt_text_encoder,
        scanned=("encoder.block",) if config.text_encoder_class == "UMT5EncoderModel" else (),
        rules=TEXT_ENCODER_RULES,
    )


def image_encoder(config: WanConfig) -> Component:
    """Return CLIP's vision model without its last layer: Wan takes the features of the last but one."""
    if config.image_encoder_class not in ("CLIPVisionModel", "CLIPVisionModelWithProjection"):
        raise CheckpointError(f"image encoder {config.image_encoder_class} is not supported; Wan's is CLIPVisionModel")
    projected = config.image_encoder_class == "CLIPVisionModelWithProjection"
    kind = getattr(transformers, config.image_encoder_class)
    prefix = "vision_model." if projected else ""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        vision = module.get_submodule("vision_model") if projected else module
        vision.encoder.layers = vision.encoder.layers[:-1]

    return Component(
        folder="image_encoder",
        build=lambda: _from_transformers(kind, config.image_encoder or {}),
        adapt=adapt,
        scanned=(f"{prefix}encoder.layers",),
        rules=WHOLE_RULES,
        # transformers 5 dropped the prefix that published CLIPVisionModel files still have.
        renames=() if projected else ((r"^vision_model\.", ""),),
    )


def _from_transformers(kind: Any, config: dict[str, Any]) -> torch.nn.Module:
    settings = {key: value for key, value in config.items() if not re.match(r"_|architectures|(torch_)?dtype", key)}
    return kind._from_config(kind.config_class(**settings), attn_implementation="eager")
