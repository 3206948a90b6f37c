"""The published LTX-2 models: configurations, which suffice to compile them, and sampling settings.

Sources: scripts/convert_ltx2_to_diffusers.py of github.com/huggingface/diffusers at 58eb52c0 (2026-08-23), which made
Lightricks/LTX-2, rootonchair/LTX-2-19b-distilled, diffusers/LTX-2.3-Diffusers, diffusers/LTX-2.3-Distilled-Diffusers
and Lightricks/LTX-2.5-Diffusers on the Hugging Face hub, and google/gemma-3-12b-it and google/gemma-4-12B-it for the
text encoders. Sampling settings are Lightricks': the defaults of ltx_pipelines/utils/constants.py and args.py in
ltx-pipelines 1.0.0 (PyPI); for LTX-2.5, those of 1.2.0 (github.com/Lightricks/LTX-2 at 400fd310, 2026-08-16). Those of
the preset `diffusers` are the defaults of pipelines/ltx2 in diffusers: of 0.42.1, and of 0.37 for LTX-2.0.
"""

from dataclasses import replace
from typing import Any

from wan_tpu.families.ltx2 import classes
from wan_tpu.families.ltx2.config import Ltx2Config, is_23, is_25
from wan_tpu.request import Defaults, Preset
from wan_tpu.requested_adapter import RequestedAdapter

CUSTOM = "a custom LTX-2"
# The ancestral method adds fresh noise in the steps of a distilled model's first stage.
EULER, ANCESTRAL = "euler", "euler-ancestral"
# The noise levels of distilled models, and those of their second stage, at twice the size; Lightricks' and diffusers'.
DISTILLED_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)
SECOND_STAGE_SIGMAS = (0.909375, 0.725, 0.421875)

# The preset of guided models that refines with an adapter what guidance has made at half the size: Lightricks'
# TI2VidTwoStagesPipeline. The adapters are the files that its documentation names, and diffusers' for LTX-2.0.
TWO_STAGES = "two-stages"
_DISTILLED_ADAPTERS = {
    "ltx-2": "Lightricks/LTX-2/ltx-2-19b-distilled-lora-384.safetensors",
    "ltx-2.3": "Lightricks/LTX-2.3/ltx-2.3-22b-distilled-lora-384-1.1.safetensors",
    "ltx-2.5": "Lightricks/LTX-2.5/loras/ltx-2.5-22b-distilled-lora-450-bf16.safetensors",
}

# How far Lightricks shifts the noise levels of models that aren't distilled, and the last of them: LTX2Scheduler of
# ltx_core/components/schedulers.py, ltx-core 1.0.0.
SHIFT, TERMINAL = 2.05, 0.1
# DEFAULT_NEGATIVE_PROMPT of ltx_pipelines/utils/constants.py, ltx-pipelines 1.0.0; distilled models have no guidance.
NEGATIVE_PROMPT = (
    "blurry, out of focus, overexposed, underexposed, low contrast, washed out colors, excessive noise, grainy "
    "texture, poor lighting, flickering, motion blur, distorted proportions, unnatural skin tones, deformed facial "
    "features, asymmetrical face, missing facial features, extra limbs, disfigured hands, wrong hand count, "
    "artifacts around text, inconsistent perspective, camera shake, incorrect depth of field, background too sharp,"
    " background clutter, distracting reflections, harsh shadows, inconsistent lighting direction, color banding, "
    "cartoonish rendering, 3D CGI look, unrealistic materials, uncanny valley effect, incorrect ethnicity, wrong "
    "gender, exaggerated expressions, wrong gaze direction, mismatched lip sync, silent or muted audio, distorted "
    "voice, robotic voice, echo, background noise, off-sync audio, incorrect dialogue, added dialogue, repetitive "
    "speech, jittery movement, awkward pauses, incorrect timing, unnatural transitions, inconsistent framing, "
    "tilted camera, flat lighting, inconsistent tone, cinematic oversaturation, stylized filters, or AI artifacts."
)
# The same of ltx-pipelines 1.2.0 begins with more.
NEGATIVE_PROMPT_25 = (
    "has_subtitles, has_blurbox, transition from black, transition to black, speech_ending_short, " + NEGATIVE_PROMPT
)

# (height, width) offered in addition to a model's own, in multiples of 64: 1080p, 720p, and the defaults.
SIZES = ((1088, 1920), (1024, 1536), (704, 1280), (512, 768))

# fmt: off
# The configuration of Gemma 3 12B.
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 1024, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
# The configuration of Gemma 4 12B, as far as public programs that run it state it: 8 heads of keys in layers with a
# window and one in all others, which have no values of their own (github.com/oarriaga/paz, pull request 439; the header
# of its GGUF file in github.com/zackshen/gguf, issue 21). Everything else is transformers' default.
GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_unified_text", "vocab_size": 262144, "hidden_size": 3840, "intermediate_size": 15360,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1,
    "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6, "attention_bias": False, "sliding_window": 1024,
}
SCHEDULER = classes.SCHEDULER | {
    "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024,
    "shift_terminal": 0.1,
}
# fmt: on
# Distilled models are sampled at the sigmas that they were trained for, unshifted.
DISTILLED_SCHEDULER = SCHEDULER | {"use_dynamic_shifting": False, "shift_terminal": None}

_TRANSFORMER_20 = classes.TRANSFORMER | {"rope_type": "split"}
_TRANSFORMER_23 = _TRANSFORMER_20 | {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
_TRANSFORMER_25 = _TRANSFORMER_23 | {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}
_CONNECTORS_20 = classes.CONNECTORS | {"rope_type": "split"}
_CONNECTORS_23 = _CONNECTORS_20 | {
    "video_connector_num_attention_heads": 32,
    "video_connector_num_layers": 8,
    "video_gated_attn": True,
    "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 64,
    "audio_connector_num_layers": 8,
    "audio_gated_attn": True,
    "per_modality_projections": True,
    "proj_bias": True,
}
_VAE_20 = classes.VAE | {"decoder_causal": False, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
_VAE_23 = _VAE_20 | {
    "block_out_channels": [256, 512, 1024, 1024],
    "decoder_block_out_channels": [256, 512, 512, 1024],
    "layers_per_block": [4, 6, 4, 2, 2],
    "decoder_layers_per_block": [4, 6, 4, 2, 2],
    "decoder_spatio_temporal_scaling": [True] * 4,
    "decoder_inject_noise": [False] * 5,
    "upsample_type": ["spatiotemporal", "spatiotemporal", "temporal", "spatial"],
    "upsample_residual": [False] * 4,
    "upsample_factor": [2, 2, 1, 2],
    "decoder_spatial_padding_mode": "zeros",
}
_VOCODER_20 = {"_class_name": "LTX2Vocoder"} | classes.VOCODER
_VOCODER_23 = {"_class_name": "LTX2VocoderWithBWE"} | classes.VOCODER_BWE

_LTX_20 = Ltx2Config(
    transformer=_TRANSFORMER_20,
    connectors=_CONNECTORS_20,
    text_encoder=GEMMA,
    vae=_VAE_20,
    audio_vae=classes.AUDIO_VAE,
    vocoder=_VOCODER_20,
    scheduler=SCHEDULER,
    upsampler=classes.UPSAMPLER,
)
_LTX_23 = Ltx2Config(
    transformer=_TRANSFORMER_23,
    connectors=_CONNECTORS_23,
    text_encoder=GEMMA,
    vae=_VAE_23,
    audio_vae=classes.AUDIO_VAE,
    vocoder=_VOCODER_23,
    scheduler=SCHEDULER,
    upsampler=classes.UPSAMPLER | {"use_rational_resampler": False},
)
_LTX_25 = replace(_LTX_23, transformer=_TRANSFORMER_25, text_encoder=GEMMA_4)


def _distil(config: Ltx2Config) -> Ltx2Config:
    return replace(config, scheduler=DISTILLED_SCHEDULER, distilled=True)


PUBLISHED: dict[str, Ltx2Config] = {
    "ltx-2": _LTX_20,
    "ltx-2-distilled": _distil(_LTX_20),
    "ltx-2.3": _LTX_23,
    "ltx-2.3-distilled": _distil(_LTX_23),
    "ltx-2.5": _LTX_25,
    "ltx-2.5-distilled": _distil(_LTX_25),
}
HUB_IDS: dict[str, str] = {
    "ltx-2": "Lightricks/LTX-2",
    "ltx-2-distilled": "rootonchair/LTX-2-19b-distilled",
    "ltx-2.3": "diffusers/LTX-2.3-Diffusers",
    "ltx-2.3-distilled": "diffusers/LTX-2.3-Distilled-Diffusers",
    "ltx-2.5-distilled": "Lightricks/LTX-2.5-Diffusers",
}


def recognise(config: Ltx2Config) -> str:
    """Return the name of the published model with a configuration, or `CUSTOM`."""
    for name, published in PUBLISHED.items():
        same = all(getattr(config, part) == getattr(published, part) for part in ("transformer", "vae", "vocoder"))
        if same and config.distilled == published.distilled:
            return name
    return CUSTOM


def defaults(config: Ltx2Config) -> Defaults:
    """Return Lightricks' sampling settings for a model.

    Distilled models have 8 steps at half the size, and 3 at the whole size if they come with an upsampler.
    """
    if config.distilled:
        return replace(_distilled_defaults(config), solver=ANCESTRAL if is_25(config) else EULER)
    negative_prompt = NEGATIVE_PROMPT_25 if is_25(config) else NEGATIVE_PROMPT
    return _make_defaults(512, 768, 30 if is_23(config) else 40, 3.0, negative_prompt)


def two_stages(config: Ltx2Config, defaults: Defaults) -> Preset:
    """Return the preset `TWO_STAGES` of a guided model with those defaults.

    A model that isn't published has no adapter of its own.
    """
    settings: dict[str, Any] = {"steps": defaults.steps + len(SECOND_STAGE_SIGMAS)}
    if (path := _DISTILLED_ADAPTERS.get(recognise(config))) is not None:
        settings["loras"] = (RequestedAdapter(path, expert="refine"),)
    about = "guidance at half the size, then three steps at the whole size by an adapter that was distilled for them"
    return Preset(about, source(config), tuple(settings.items()))


def diffusers_defaults(config: Ltx2Config) -> Defaults:
    """Return the defaults of diffusers' LTX2Pipeline, which hold for guided models; of others, the solver differs."""
    return _distilled_defaults(config) if config.distilled else _make_defaults(512, 768, 30, 3.0)


def _distilled_defaults(config: Ltx2Config) -> Defaults:
    first, second = len(DISTILLED_SIGMAS), len(SECOND_STAGE_SIGMAS)
    if config.upsampler is None:  # Lightricks has no program for a single stage.
        return _make_defaults(512, 768, first, 1.0)
    return _make_defaults(1024, 1536, first + second, 1.0)


def _make_defaults(height: int, width: int, steps: int, scale: float, negative_prompt: str = "") -> Defaults:
    return Defaults(
        height=height,
        width=width,
        frames=121,
        fps=24,
        steps=steps,
        guidance_scale=scale,
        guidance_scale_2=scale,
        shift=1.0,
        solver=EULER,
        generate_audio=True,
        negative_prompt=negative_prompt,
    )


def source(config: Ltx2Config) -> str:
    """Return the address of the authors' program."""
    if is_25(config):
        return (
            "https://github.com/Lightricks/LTX-2/tree/400fd31054597515f47125691032c04b1c3ee24e/packages/ltx-pipelines"
        )
    return "https://pypi.org/project/ltx-pipelines/1.0.0"
