"""The torch modules of a Wan model, and how each is built, adapted, scanned and sharded."""

import functools
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from jax.sharding import Mesh

from wan_tpu.errors import CheckpointError
from wan_tpu.families.shared.convolutions import vae_component
from wan_tpu.families.shared.t5 import from_transformers
from wan_tpu.families.shared.tokens import half_split
from wan_tpu.families.wan import transformer as expert
from wan_tpu.families.wan import vae
from wan_tpu.families.wan.published import WanConfig
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule

# The names in Wan's own files, from github.com/Wan-Video/Wan2.2, wan/modules/model.py.
ORIGINALS = (
    (r"\.attn1\.proj_l\.", ".self_attn.attn_op.local_attn.proj_l."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"_attn\.to_([qkv])\.", r"_attn.\1."),
    (r"_attn\.to_out\.0\.", "_attn.o."),
    (r"\.add_([kv])_proj\.", r".\1_img."),
    (r"\.norm_added_k\.", ".norm_k_img."),
    (r"^(blocks\.\d+)\.norm2\.", r"\1.norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"^proj_out\.", "head.head."),
    (r"^(blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
    (r"^scale_shift_table$", "head.modulation"),
)
# Weights for CLIP's features, which Wan 2.2 doesn't use; LightX2V's adapter of its low-noise expert has some.
_IMAGE_WEIGHTS = (
    r"blocks[._]\d+[._](attn2|cross_attn)[._](add_[kv]_proj|norm_added_k|[kv]_img|norm_k_img)",
    r"(img_emb|condition_embedder[._]image_embedder)[._].*",
)
SPARSE = ("attention", "kept_blocks")  # Keys of a transformer's configuration that are unknown to diffusers.
# CLIP (0.6 G parameters) is replicated on every device, as is the VAE (0.13 to 0.7 G).
WHOLE_RULES = (Rule(r".*", ()),)


def transformer(config: WanConfig, folder: str) -> Component:
    """Return the expert in the checkpoint's `folder`."""
    paired = functools.partial(half_split, config.transformer["num_attention_heads"])
    return Component(
        folder=folder,
        build=lambda: build_expert(config.transformer),
        adapt=lambda module, mesh: None,
        scanned=("blocks",),
        rules=expert.RULES,
        float32=(*WanTransformer3DModel._keep_in_fp32_modules, "proj_l"),
        changes=((r"blocks\.\*\.attn1\.(to|norm)_[qk]\.(weight|bias)", paired),),
        originals=ORIGINALS,
        absent=_IMAGE_WEIGHTS if config.transformer.get("image_dim") is None else (),
        matrices=expert.MATRICES,
        logits="attention" not in config.transformer,
    )


def build_expert(settings: dict[str, Any]) -> WanTransformer3DModel:
    """Return diffusers' module, with the weights of sparse-linear attention if `settings` have it."""
    module = WanTransformer3DModel.from_config({key: settings[key] for key in settings if key not in SPARSE})
    if settings.get("attention") == "sla":
        width = settings["attention_head_dim"]
        for block in module.blocks:
            block.attn1.proj_l = torch.nn.Linear(width, width)
    return module


def vae_half(config: WanConfig, *dropped: str) -> Component:
    """Return the VAE without the parts named in `dropped`."""
    return vae_component(lambda: AutoencoderKLWan.from_config(config.vae), vae.CHANGES, dropped)


def image_encoder(config: WanConfig) -> Component:
    """Return CLIP's vision model without its last layer, since Wan takes the features of the last but one."""
    if config.image_encoder_class not in ("CLIPVisionModel", "CLIPVisionModelWithProjection"):
        raise CheckpointError(
            f"image encoder {config.image_encoder_class} is not supported; supported: CLIPVisionModel"
        )
    projected = config.image_encoder_class == "CLIPVisionModelWithProjection"
    kind = getattr(transformers, config.image_encoder_class)
    prefix = "vision_model." if projected else ""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        vision = module.get_submodule("vision_model") if projected else module
        vision.encoder.layers = vision.encoder.layers[:-1]

    return Component(
        folder="image_encoder",
        build=lambda: from_transformers(kind, config.image_encoder or {}),
        adapt=adapt,
        scanned=(f"{prefix}encoder.layers",),
        rules=WHOLE_RULES,
        # transformers 5 dropped the prefix that published files of CLIPVisionModel still have.
        renames=() if projected else ((r"^vision_model\.", ""),),
    )
