"""The published Helios models: configurations, which suffice to compile them, and sampling settings.

Helios (arXiv 2603.04379) is Wan 2.1 T2V 14B that continues a video: its text encoder and VAE are Wan's, and its
transformer has three more patch embeddings, for the frames before. Sources: the model_index.json and config.json files
of BestWishYsh/Helios-Base, -Mid and -Distilled on the Hugging Face hub; sampling settings from infer_helios.py and
scripts/inference of github.com/PKU-YuanGroup/Helios at 2276f8fe.
"""

from dataclasses import dataclass, replace
from typing import Any

from wan_tpu.families.wan.published import TEXT_TOKENS as TEXT_TOKENS  # Prompts have as many tokens as Wan's.
from wan_tpu.families.wan.published import UMT5_XXL, VAE_21
from wan_tpu.request import Defaults

CUSTOM = "a custom Helios"
CHUNK_FRAMES = 9  # Latent frames of a chunk, 33 frames: a default of the pipelines that no file has.
# Latent frames of the long, mid and short history, without the anchor: also a default of the pipelines.
HISTORY = (16, 2, 1)


@dataclass(frozen=True)
class PyramidConfig:
    """The settings of a HeliosScheduler or HeliosDMDScheduler that differ between models.

    Attributes:
        stages: Number of sizes at which a chunk is denoised, each twice the previous one; 1 means its own size only.
        stage_range: The share of the training schedule at which each stage begins, and 1.
        gamma: How strongly the noise between stages is correlated within the square that a pixel becomes.
        shift: The shift of the training schedule.
        dynamic: Whether each stage's schedule is shifted by its number of tokens.
        shift_type: How it is shifted: "exponential" or "linear".
        shift_tokens, shifts: Two numbers of tokens and their shifts; all others are on the line through them.
        solver: "unipc", "euler", or "dmd" for a distilled model, which makes a whole estimate in every step.
    """

    stages: int = 3
    stage_range: tuple[float, ...] = (0, 1 / 3, 2 / 3, 1)
    gamma: float = 1 / 3
    shift: float = 1.0
    dynamic: bool = False
    shift_type: str = "exponential"
    shift_tokens: tuple[int, int] = (256, 4096)
    shifts: tuple[float, float] = (0.5, 1.15)
    solver: str = "unipc"


@dataclass(frozen=True)
class HeliosConfig:
    """The configuration of a Helios model, from a checkpoint or as published."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]
    text_encoder_class: str
    pyramid: PyramidConfig
    # Whether guidance is CFG-Zero*: the negative prompt's velocity is scaled to fit the prompt's, and the first steps
    # of a chunk leave the noise alone.
    scaled_guidance: bool = False

    @property
    def distilled(self) -> bool:
        """Whether the model was distilled to few steps without guidance."""
        return self.pyramid.solver == "dmd"


# The values are also the defaults of diffusers' class, for keys that a file lacks.
# fmt: off
TRANSFORMER: dict[str, Any] = {
    "patch_size": [1, 2, 2], "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "num_layers": 40,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "added_kv_proj_dim": None,
    "rope_dim": [44, 42, 42], "rope_theta": 10000.0, "guidance_cross_attn": True, "zero_history_timestep": True,
    "has_multi_term_memory_patch": True, "is_amplify_history": False, "history_scale_mode": "per_head",
}
# fmt: on


def _configuration(pyramid: PyramidConfig, *, scaled_guidance: bool = False) -> HeliosConfig:
    return HeliosConfig(TRANSFORMER, VAE_21, UMT5_XXL, "UMT5EncoderModel", pyramid, scaled_guidance)


PUBLISHED: dict[str, HeliosConfig] = {
    "helios-base": _configuration(PyramidConfig(stages=1, dynamic=True)),
    "helios-mid": _configuration(PyramidConfig(dynamic=True), scaled_guidance=True),
    "helios-distilled": _configuration(PyramidConfig(dynamic=True, shift_type="linear", solver="dmd")),
}
# The default of --negative_prompt of infer_helios.py.
NEGATIVE_PROMPT = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, "
    "overall gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, "
    "poorly drawn hands, poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, still "
    "picture, messy background, three legs, many people in the background, walking backwards"
)
# Steps of a chunk, or of each stage if there are several; the scale of guidance.
SAMPLING: dict[str, tuple[int, float]] = {
    "helios-base": (50, 5.0),
    "helios-mid": (60, 5.0),
    "helios-distilled": (6, 1.0),
}
HUB_IDS: dict[str, str] = {
    "helios-base": "BestWishYsh/Helios-Base",
    "helios-mid": "BestWishYsh/Helios-Mid",
    "helios-distilled": "BestWishYsh/Helios-Distilled",
}


def recognise(config: HeliosConfig) -> str:
    for name, published in PUBLISHED.items():
        same_transformer = all(config.transformer.get(key) == value for key, value in published.transformer.items())
        same_way = (config.distilled, config.scaled_guidance, config.pyramid.stages) == (
            published.distilled,
            published.scaled_guidance,
            published.pyramid.stages,
        )
        if same_transformer and same_way and config.vae["z_dim"] == published.vae["z_dim"]:
            return name
    return CUSTOM


def defaults(config: HeliosConfig) -> Defaults:
    """Return the settings of the authors' program; a custom model has those of its nearest relative."""
    relative = "helios-distilled" if config.distilled else "helios-base" if config.pyramid.stages == 1 else "helios-mid"
    steps, guidance_scale = SAMPLING[relative]
    return Defaults(
        height=384,
        width=640,
        frames=99,
        fps=24,
        steps=steps,
        guidance_scale=guidance_scale,
        guidance_scale_2=guidance_scale,
        shift=config.pyramid.shift,
        solver=config.pyramid.solver,
        negative_prompt=NEGATIVE_PROMPT if guidance_scale > 1 else "",
    )


def diffusers_defaults(config: HeliosConfig) -> Defaults:
    """Return the defaults of diffusers' HeliosPipeline, or HeliosPyramidPipeline: ten steps at each size."""
    steps = 50 if config.pyramid.stages == 1 else 10 * config.pyramid.stages
    return replace(defaults(config), frames=132, steps=steps, negative_prompt="")


def source(config: HeliosConfig) -> str:
    return "https://github.com/PKU-YuanGroup/Helios/blob/2276f8fe/infer_helios.py"
