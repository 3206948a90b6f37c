"""The published Wan models: their configurations, which suffice to compile them, and their sampling settings.

Sources: the config.json files of the Wan-AI/*-Diffusers repositories on the Hugging Face hub (diffusers'
scripts/convert_wan_to_diffusers.py has the same values), google/umt5-xxl and laion/CLIP-ViT-H-14 for the encoders;
solver, and the shift that diffusers takes, from scheduler/scheduler_config.json there.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from wan_tpu.request import Defaults

TEXT_TOKENS = 512  # Tokens of every prompt, padding included: a constant of the pipelines.

CUSTOM = "a custom Wan"


@dataclass(frozen=True)
class WanConfig:
    """The configuration of a Wan model, from a checkpoint or as published.

    Attributes:
        shift: The shift of the checkpoint's scheduler, which is diffusers' and not that of Wan's own program.
        solver: Our name of the scheduler's class, "unipc" or "euler".
        resolution: "480p" or "720p" if the checkpoint's name says so, otherwise "". It matters because Wan 2.1 I2V was
            published as two models with the same configuration files.
    """

    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]
    image_encoder: dict[str, Any] | None
    text_encoder_class: str
    image_encoder_class: str | None
    boundary_ratio: float | None
    expand_timesteps: bool
    shift: float
    solver: str = "unipc"
    resolution: str = field(default="", metadata={"traced": False})  # It is read from a folder's name.

    @property
    def attention_density(self) -> float | None:
        """The share of the blocks of keys that sparse-linear attention keeps; None for attention to all keys."""
        return self.transformer["kept_blocks"] if self.transformer.get("attention") == "sla" else None

    @property
    def two_experts(self) -> bool:
        """Whether one expert runs the steps before the boundary, another those after it."""
        return self.boundary_ratio is not None


# The first transformer's and VAE's values are also the defaults of diffusers' classes, for keys that a file lacks.
# fmt: off
TRANSFORMER_14B: dict[str, Any] = {
    "patch_size": [1, 2, 2], "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "num_layers": 40,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "image_dim": None,
    "added_kv_proj_dim": None, "rope_max_seq_len": 1024, "pos_embed_seq_len": None,
}
TRANSFORMER_14B_I2V_21 = TRANSFORMER_14B | {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
TRANSFORMER_14B_FLF2V = TRANSFORMER_14B_I2V_21 | {"pos_embed_seq_len": 514}  # The features of two images.
TRANSFORMER_14B_I2V_22 = TRANSFORMER_14B | {"in_channels": 36}
# TurboDiffusion, arXiv 2512.16093, with the attention density of its script inference/wan2.2_i2v_infer.py.
TRANSFORMER_14B_TURBO = TRANSFORMER_14B_I2V_22 | {"attention": "sla", "kept_blocks": 0.1}
TRANSFORMER_1_3B = TRANSFORMER_14B | {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
TRANSFORMER_5B = TRANSFORMER_14B | {
    "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48,
}

VAE_21: dict[str, Any] = {
    "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True], "dropout": 0.0, "decoder_base_dim": None, "is_residual": False,
    "in_channels": 3, "out_channels": 3, "patch_size": None, "scale_factor_spatial": 8, "scale_factor_temporal": 4,
    "latents_mean": [
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632,
        -0.1922, -0.9497, 0.2503, -0.2921,
    ],
    "latents_std": [
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579,
        1.6382, 1.1253, 2.8251, 1.9160,
    ],
}
VAE_22: dict[str, Any] = VAE_21 | {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
    "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
UMT5_XXL: dict[str, Any] = {
    "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "feed_forward_proj": "gated-gelu",
    "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1,
}
CLIP_VIT_H: dict[str, Any] = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 14, "hidden_act": "gelu", "projection_dim": 1024,
}
# fmt: on


def _configuration(
    transformer: dict[str, Any],
    shift: float,
    *,
    vae: dict[str, Any] = VAE_21,
    clip: bool = False,
    boundary_ratio: float | None = None,
    expand_timesteps: bool = False,
    resolution: str = "",
) -> WanConfig:
    return WanConfig(
        transformer=transformer,
        vae=vae,
        text_encoder=UMT5_XXL,
        image_encoder=CLIP_VIT_H if clip else None,
        text_encoder_class="UMT5EncoderModel",
        image_encoder_class="CLIPVisionModelWithProjection" if clip else None,
        boundary_ratio=boundary_ratio,
        expand_timesteps=expand_timesteps,
        shift=shift,
        resolution=resolution,
    )


PUBLISHED: dict[str, WanConfig] = {
    "wan2.1-t2v-1.3b": _configuration(TRANSFORMER_1_3B, 3.0),
    "wan2.1-t2v-14b": _configuration(TRANSFORMER_14B, 3.0),
    "wan2.1-i2v-14b-480p": _configuration(TRANSFORMER_14B_I2V_21, 3.0, clip=True, resolution="480p"),
    "wan2.1-i2v-14b-720p": _configuration(TRANSFORMER_14B_I2V_21, 3.0, clip=True, resolution="720p"),
    "wan2.1-flf2v-14b-720p": _configuration(TRANSFORMER_14B_FLF2V, 16.0, clip=True),
    "wan2.2-t2v-a14b": _configuration(TRANSFORMER_14B, 3.0, boundary_ratio=0.875),
    "wan2.2-i2v-a14b": _configuration(TRANSFORMER_14B_I2V_22, 3.0, boundary_ratio=0.9),
    "wan2.2-ti2v-5b": _configuration(TRANSFORMER_5B, 5.0, vae=VAE_22, expand_timesteps=True),
    "turbowan2.2-i2v-a14b": _configuration(TRANSFORMER_14B_TURBO, 3.0, boundary_ratio=0.9),
}

# Sampling settings of Wan's own programs: wan/configs and generate.py of github.com/Wan-Video/Wan2.1 at 9737cba9, and
# wan/configs of Wan2.2 at 42bf4cfa. The size is that of its README's example where generate.py's default (1280x720)
# isn't one that it supports for the model. Wan 2.1 I2V is one model in that program, whose shift follows the size.
FIELDS = ("height", "width", "frames", "fps", "steps", "guidance_scale", "guidance_scale_2", "shift")
SAMPLING: dict[str, tuple[int, int, int, int, int, float, float, float]] = {
    "wan2.1-t2v-1.3b": (480, 832, 81, 16, 50, 5.0, 5.0, 5.0),
    "wan2.1-t2v-14b": (720, 1280, 81, 16, 50, 5.0, 5.0, 5.0),
    "wan2.1-i2v-14b-480p": (480, 832, 81, 16, 40, 5.0, 5.0, 3.0),
    "wan2.1-i2v-14b-720p": (720, 1280, 81, 16, 40, 5.0, 5.0, 5.0),
    "wan2.1-flf2v-14b-720p": (720, 1280, 81, 16, 50, 5.0, 5.0, 16.0),
    "wan2.2-t2v-a14b": (720, 1280, 81, 16, 40, 4.0, 3.0, 12.0),
    "wan2.2-i2v-a14b": (720, 1280, 81, 16, 40, 3.5, 3.5, 5.0),
    "wan2.2-ti2v-5b": (704, 1280, 121, 24, 50, 5.0, 5.0, 5.0),
    # turbodiffusion/inference/wan2.2_i2v_infer.py of github.com/thu-ml/TurboDiffusion (35074d4b). There an image is
    # stretched to this size unless --adaptive_resolution is given; here the size always follows the image's shape.
    "turbowan2.2-i2v-a14b": (720, 1280, 81, 16, 4, 1.0, 1.0, 3.0),  # Its solver has no shift.
}
AREA_480P, SHIFT_480P, SHIFT_720P = 480 * 832, 3.0, 5.0  # Of Wan 2.1 I2V.
# sample_neg_prompt of wan/configs/shared_config.py; wan_i2v_14B.py and __init__.py of Wan 2.1 put more before it.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
_SHAKING, _CUTS = "镜头晃动，", "镜头切换，"
NEGATIVE_PROMPTS = {
    "wan2.1-i2v-14b-480p": _SHAKING + NEGATIVE_PROMPT,
    "wan2.1-i2v-14b-720p": _SHAKING + NEGATIVE_PROMPT,
    "wan2.1-flf2v-14b-720p": _CUTS + _SHAKING + NEGATIVE_PROMPT,
}
# TurboWan is published as .pth files only.
HUB_IDS: dict[str, str] = {
    "wan2.1-t2v-1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan2.1-t2v-14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "wan2.1-i2v-14b-480p": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "wan2.1-i2v-14b-720p": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    "wan2.1-flf2v-14b-720p": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    "wan2.2-t2v-a14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "wan2.2-i2v-a14b": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "wan2.2-ti2v-5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
}


def recognise(config: WanConfig) -> str:
    """Return the name of the published model with a configuration, or `CUSTOM`.

    A Wan 2.1 I2V whose name has neither 480p nor 720p is assumed to be the 480p model.
    """
    for name, published in PUBLISHED.items():
        fixed = {key: value for key, value in published.transformer.items() if key != "kept_blocks"}
        same_transformer = all(config.transformer.get(key) == value for key, value in fixed.items())
        same_attention = config.transformer.get("attention") == published.transformer.get("attention")
        same_rest = all(
            getattr(config, key) == getattr(published, key) for key in ("boundary_ratio", "expand_timesteps")
        )
        same_vae = config.vae["z_dim"] == published.vae["z_dim"]
        same_resolution = published.resolution in ("", config.resolution or published.resolution)
        if same_transformer and same_attention and same_rest and same_vae and same_resolution:
            return name
    return CUSTOM


def defaults(config: WanConfig) -> Defaults:
    """Return the settings of Wan's own program; a custom model has those of its nearest relative.

    A checkpoint whose shift isn't the one that was published keeps its own: whoever trained it chose it.
    """
    values: dict[str, Any] = dict(zip(FIELDS, SAMPLING[_relative(config)], strict=True))
    if not has_published_shift(config):
        values["shift"] = config.shift
    solver = config.solver if config.attention_density is None else "rcm"
    negative = NEGATIVE_PROMPTS.get(recognise(config), NEGATIVE_PROMPT) if values["guidance_scale"] > 1 else ""
    return Defaults(**values, solver=solver, negative_prompt=negative)


def diffusers_defaults(config: WanConfig) -> Defaults | None:
    """Return the defaults of diffusers' WanPipeline and WanImageToVideoPipeline; there is none for TurboWan.

    The shift is that of the checkpoint's scheduler.
    """
    if config.attention_density is not None:
        return None
    return replace(
        defaults(config),
        height=480,
        width=832,
        frames=81,
        steps=50,
        guidance_scale=5.0,
        guidance_scale_2=5.0,
        shift=config.shift,
        negative_prompt="",
    )


def has_published_shift(config: WanConfig) -> bool:
    """Return whether a checkpoint's scheduler is that of the published model."""
    name = recognise(config)
    return name != CUSTOM and config.shift == PUBLISHED[name].shift


def source(config: WanConfig) -> str:
    relative = _relative(config)
    if relative.startswith("turbo"):
        return "https://github.com/thu-ml/TurboDiffusion/blob/35074d4b/turbodiffusion/inference/wan2.2_i2v_infer.py"
    repository, commit = ("Wan2.1", "9737cba9") if relative.startswith("wan2.1") else ("Wan2.2", "42bf4cfa")
    return f"https://github.com/Wan-Video/{repository}/tree/{commit}/wan/configs"


def _relative(config: WanConfig) -> str:
    """Return the name of the published model with a configuration, or of the nearest one to a custom model."""
    name = recognise(config)
    if name != CUSTOM:
        return name
    if config.attention_density is not None:
        return "turbowan2.2-i2v-a14b"
    return "wan2.2-i2v-a14b" if config.transformer["in_channels"] > config.vae["z_dim"] else "wan2.1-t2v-14b"
