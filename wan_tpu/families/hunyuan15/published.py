"""The published HunyuanVideo-1.5 models: configurations, which suffice to compile them, and sampling settings.

Sources: scripts/convert_hunyuan_video1_5_to_diffusers.py of github.com/huggingface/diffusers, which made the
HunyuanVideo-1.5-Diffusers-* repositories on the Hugging Face hub; Qwen/Qwen2.5-VL-7B-Instruct, google/byt5-small with
the tokens of Glyph-SDXL-v2, and google/siglip-so400m-patch14-384 for the encoders; shift, guidance and steps from
PIPELINE_CONFIGS in hyvideo/commons/__init__.py, and length and aspect ratio from generate.py, of
github.com/Tencent-Hunyuan/HunyuanVideo-1.5 at 60783e70.
"""

from dataclasses import dataclass, replace
from typing import Any

from wan_tpu.families.hunyuan15.sizes import default_size
from wan_tpu.request import Defaults

# Constants of the pipelines: tokens of a prompt, of the chat template's start before it, and of its quoted text.
TEXT_TOKENS, TEMPLATE_TOKENS, GLYPH_TOKENS = 1000, 108, 256

CUSTOM = "a custom HunyuanVideo-1.5"


@dataclass(frozen=True)
class HunyuanConfig:
    """The configuration of a HunyuanVideo-1.5 model, from a checkpoint or as published."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]  # Qwen2.5-VL's language model.
    glyph_encoder: dict[str, Any]  # ByT5, for quoted text.
    image_encoder: dict[str, Any] | None  # SigLIP, or None for text to video.
    shift: float  # The shift of its flow schedule.
    guidance: float  # The scale of its guider, 1 for a distilled model.
    # The side in pixels of the VAE's tiles, which published recipes use; None for whole pictures.
    vae_tile: int | None = None

    @property
    def meanflow(self) -> bool:
        """Whether the transformer also takes the timestep after a step's own, as the step-distilled model does."""
        return bool(self.transformer["use_meanflow"])


# The transformer's and VAE's values are also the defaults of diffusers' classes, for keys that a file lacks.
# fmt: off
TRANSFORMER: dict[str, Any] = {
    "in_channels": 65, "out_channels": 32, "num_attention_heads": 16, "attention_head_dim": 128, "num_layers": 54,
    "num_refiner_layers": 2, "mlp_ratio": 4.0, "patch_size": 1, "patch_size_t": 1, "qk_norm": "rms_norm",
    "text_embed_dim": 3584, "text_embed_2_dim": 1472, "image_embed_dim": 1152, "rope_theta": 256.0,
    "rope_axes_dim": [16, 56, 56], "target_size": 640, "task_type": "i2v", "use_meanflow": False,
}
VAE: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 32, "block_out_channels": [128, 256, 512, 1024, 1024],
    "layers_per_block": 2, "spatial_compression_ratio": 16, "temporal_compression_ratio": 4,
    "downsample_match_channel": True, "upsample_match_channel": True, "scaling_factor": 1.03682,
}
QWEN: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]},
}
BYT5: dict[str, Any] = {
    "vocab_size": 1510, "d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "feed_forward_proj": "gated-gelu",
    "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}
# fmt: on


def _configuration(
    task: str, target: int, shift: float, guidance: float = 6.0, *, meanflow: bool = False
) -> HunyuanConfig:
    """Return a configuration; videos have the area of a square with a side of `target` pixels."""
    transformer = TRANSFORMER | {"target_size": target, "task_type": task, "use_meanflow": meanflow}
    return HunyuanConfig(transformer, VAE, QWEN, BYT5, SIGLIP if task == "i2v" else None, shift, guidance)


PUBLISHED: dict[str, HunyuanConfig] = {
    "hunyuanvideo1.5-480p-t2v": _configuration("t2v", 640, 5.0),
    "hunyuanvideo1.5-480p-i2v": _configuration("i2v", 640, 5.0),
    "hunyuanvideo1.5-720p-t2v": _configuration("t2v", 960, 9.0),
    "hunyuanvideo1.5-720p-i2v": _configuration("i2v", 960, 7.0),
    "hunyuanvideo1.5-480p-t2v-distilled": _configuration("t2v", 640, 5.0, 1.0),
    "hunyuanvideo1.5-480p-i2v-distilled": _configuration("i2v", 640, 5.0, 1.0),
    "hunyuanvideo1.5-720p-i2v-distilled": _configuration("i2v", 960, 7.0, 1.0),
    "hunyuanvideo1.5-480p-i2v-step-distilled": _configuration("i2v", 640, 7.0, 1.0, meanflow=True),
}
_HUB = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers"
HUB_IDS: dict[str, str] = {name: f"{_HUB}-{name.partition('-')[2].replace('-', '_')}" for name in PUBLISHED}


def recognise(config: HunyuanConfig) -> str:
    for name, published in PUBLISHED.items():
        same = all(config.transformer[key] == value for key, value in published.transformer.items())
        if same and (config.shift, config.guidance) == (published.shift, published.guidance):
            return name
    return CUSTOM


def defaults(config: HunyuanConfig) -> Defaults:
    """Return the settings of the authors' program, which are diffusers', too, with a size of 16 : 9.

    That program then runs a super-resolution model unless it is told not to (`--sr false`).
    """
    height, width = default_size(config.transformer["target_size"], 9, 16)
    return Defaults(
        height=height,
        width=width,
        frames=121,
        fps=24,
        steps=12 if config.meanflow else 50,
        guidance_scale=config.guidance,
        guidance_scale_2=config.guidance,
        shift=config.shift,
        solver="euler",
    )


def diffusers_defaults(config: HunyuanConfig) -> Defaults:
    """Return the defaults of diffusers' pipelines: 50 steps for a model that was distilled for fewer, too."""
    return replace(defaults(config), steps=50)


def source(config: HunyuanConfig) -> str:
    return "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5/blob/60783e70/hyvideo/commons/__init__.py"
