"""The torch modules of a HunyuanVideo-1.5 model, and how each is built, adapted, scanned and sharded."""

import dataclasses
import functools

import torch
import transformers
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from jax.sharding import Mesh

from wan_tpu.families.hunyuan15 import transformer as expert
from wan_tpu.families.hunyuan15 import vae
from wan_tpu.families.hunyuan15.published import HunyuanConfig
from wan_tpu.families.shared import t5
from wan_tpu.families.shared.convolutions import vae_component
from wan_tpu.families.shared.tokens import half_split
from wan_tpu.runtime.components import Component
from wan_tpu.runtime.mesh import Rule

# SigLIP (0.4 G parameters) and ByT5 (0.2 G) are replicated on every device, as is each half of the VAE (1.26 G).
_REPLICATED = (Rule(r".*", ()),)
# Shardings of Qwen (7 G parameters): projections [O outputs, I inputs] are split by outputs or inputs.
_COLUMNS, _ROWS = ("tp", None), (None, "tp")
_QWEN_RULES = (
    Rule(r"embed_tokens\.weight", _ROWS),  # [vocabulary, C]
    Rule(r"layers\..*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight", _COLUMNS),
    Rule(r"layers\..*\.(q_proj|k_proj|v_proj)\.bias", ("tp",)),
    Rule(r"layers\..*\.(o_proj|down_proj)\.weight", _ROWS),
    Rule(r".*norm\.weight", ()),
)
# The names in the model's own files, from github.com/Tencent-Hunyuan/HunyuanVideo-1.5,
# hyvideo/models/transformers/hunyuanvideo_1_5_transformer.py. The refiner's queries, keys and values are one matrix
# there. The last modulation is missing here, because its halves are swapped and no adapter is known to train it.
_ORIGINALS = (
    (r"^time_embed\.timestep_embedder\.linear_1\.", "time_in.mlp.0."),
    (r"^time_embed\.timestep_embedder\.linear_2\.", "time_in.mlp.2."),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1\.", "txt_in.t_embedder.mlp.0."),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2\.", "txt_in.t_embedder.mlp.2."),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.proj_in\.", "txt_in.input_embedder."),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.", "txt_in.individual_token_refiner.blocks."),
    (r"^(txt_in\..*)\.attn\.to_[qkv]\.", r"\1.self_attn_qkv."),
    (r"^(txt_in\..*)\.attn\.to_out\.0\.", r"\1.self_attn_proj."),
    (r"^(txt_in\..*)\.ff\.net\.0\.proj\.", r"\1.mlp.fc1."),
    (r"^(txt_in\..*)\.ff\.net\.2\.", r"\1.mlp.fc2."),
    (r"^(txt_in\..*)\.norm_out\.linear\.", r"\1.adaLN_modulation.1."),
    (r"^context_embedder_2\.norm\.", "byt5_in.layernorm."),
    (r"^context_embedder_2\.linear_", "byt5_in.fc"),
    (r"^image_embedder\.norm_in\.", "vision_in.proj.0."),
    (r"^image_embedder\.linear_1\.", "vision_in.proj.1."),
    (r"^image_embedder\.linear_2\.", "vision_in.proj.3."),
    (r"^image_embedder\.norm_out\.", "vision_in.proj.4."),
    (r"^x_embedder\.", "img_in."),
    (r"^cond_type_embed\.", "cond_type_embedding."),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^(double_blocks\.\d+)\.norm1\.", r"\1.img_mod."),
    (r"^(double_blocks\.\d+)\.norm1_context\.", r"\1.txt_mod."),
    (r"^(double_blocks\.\d+)\.attn\.to_([qkv])\.", r"\1.img_attn_\2."),
    (r"^(double_blocks\.\d+)\.attn\.norm_([qk])\.", r"\1.img_attn_\2_norm."),
    (r"^(double_blocks\.\d+)\.attn\.to_out\.0\.", r"\1.img_attn_proj."),
    (r"^(double_blocks\.\d+)\.attn\.add_([qkv])_proj\.", r"\1.txt_attn_\2."),
    (r"^(double_blocks\.\d+)\.attn\.norm_added_([qk])\.", r"\1.txt_attn_\2_norm."),
    (r"^(double_blocks\.\d+)\.attn\.to_add_out\.", r"\1.txt_attn_proj."),
    (r"^(double_blocks\.\d+)\.ff\.net\.0\.proj\.", r"\1.img_mlp.fc1."),
    (r"^(double_blocks\.\d+)\.ff\.net\.2\.", r"\1.img_mlp.fc2."),
    (r"^(double_blocks\.\d+)\.ff_context\.net\.0\.proj\.", r"\1.txt_mlp.fc1."),
    (r"^(double_blocks\.\d+)\.ff_context\.net\.2\.", r"\1.txt_mlp.fc2."),
    (r"^proj_out\.", "final_layer.linear."),
)
# ComfyUI's names, with queries, keys and values in one matrix.
_ALIASES = (
    (r"_attn_(qkv|[qkv])\.", "_attn.qkv."),
    (r"_attn_proj\.", "_attn.proj."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"_mod\.linear\.", "_mod.lin."),
)
_UNUSED_LAYERS = 2  # The last layers of Qwen, which the model doesn't use: it reads hidden_states[-3].


def transformer(config: HunyuanConfig) -> Component:
    """Return the transformer; context and video meet in attention, so the channels of both are reordered for RoPE."""
    heads = config.transformer["num_attention_heads"]
    projections = r"transformer_blocks\.\*\.attn\.(to_[qk]|add_[qk]_proj)\.(weight|bias)"
    norms = r"transformer_blocks\.\*\.attn\.norm_(added_)?[qk]\.weight"  # These are per head.
    return Component(
        folder="transformer",
        build=lambda: HunyuanVideo15Transformer3DModel.from_config(config.transformer),
        adapt=lambda module, mesh: None,
        scanned=("transformer_blocks",),
        rules=expert.RULES,
        matrices=expert.MATRICES,
        logits=True,
        changes=((projections, functools.partial(half_split, heads)), (norms, functools.partial(half_split, 1))),
        originals=_ORIGINALS,
        aliases=_ALIASES,
    )


def text_encoder(config: HunyuanConfig) -> Component:
    """Return Qwen2.5-VL's language model without its last layers and its last norm, which aren't used."""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        module.layers = module.get_submodule("layers")[:-_UNUSED_LAYERS]
        module.norm = torch.nn.Identity()

    return Component(
        folder="text_encoder",
        build=lambda: t5.from_transformers(transformers.Qwen2_5_VLTextModel, config.text_encoder),
        adapt=adapt,
        scanned=("layers",),
        rules=_QWEN_RULES,
    )


def glyph_encoder(config: HunyuanConfig) -> Component:
    """Return ByT5, replicated because few meshes divide its six heads."""
    encoder = t5.text_encoder("T5EncoderModel", config.glyph_encoder)
    return dataclasses.replace(encoder, folder="text_encoder_2", rules=_REPLICATED)


def image_encoder(config: HunyuanConfig) -> Component:
    """Return SigLIP without the head that pools a picture into a single vector."""

    def adapt(module: torch.nn.Module, mesh: Mesh) -> None:
        module.use_head = False
        module.head = None

    return Component(
        folder="image_encoder",
        build=lambda: t5.from_transformers(transformers.SiglipVisionModel, config.image_encoder or {}),
        adapt=adapt,
        scanned=("encoder.layers",),
        rules=_REPLICATED,
        renames=((r"^vision_model\.", ""),),
    )


def vae_half(config: HunyuanConfig, dropped: str) -> Component:
    """Return the VAE without the half named in `dropped`."""
    return vae_component(lambda: AutoencoderKLHunyuanVideo15.from_config(config.vae), vae.CHANGES, (dropped,))
