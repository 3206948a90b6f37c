"""The configuration of an LTX-2 model, from a checkpoint or as published."""

import re
from dataclasses import dataclass
from typing import Any

from wan_tpu.checkpoint import SETTINGS, Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2 import classes
from wan_tpu.families.shared.settings import FLOW_MATCH_EULER, check_supported, complete_config

# The published models, as wan_tpu.json may name them.
MODELS = ("ltx-2", "ltx-2-distilled", "ltx-2.3", "ltx-2.3-distilled", "ltx-2.5", "ltx-2.5-distilled")
# The index doesn't name these folders, which belong to other pipelines of diffusers.
_UPSAMPLER, _DIFFUSION_DECODER = "latent_upsampler", "diffusion_decoder"
_DURATION_HEAD = "duration_head"
DECODERS = ("convolutional", "diffusion")  # As wan_tpu.json may name them, the usual one first.
_GEMMA_3, _GEMMA_4 = "Gemma3ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"
_CLASSES = {
    "transformer": ("LTX2VideoTransformer3DModel",),
    "connectors": ("LTX2TextConnectors",),
    "text_encoder": (_GEMMA_3, _GEMMA_4),
    "vae": ("AutoencoderKLLTX2Video",),
    "audio_vae": ("AutoencoderKLLTX2Audio",),
    "vocoder": tuple(classes.VOCODERS),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
}
# Keys of the transformer's configuration that distinguish the versions.
_LATER = {
    "use_prompt_embeddings": False,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "gated_attn": True,
    "audio_gated_attn": True,
}
_VERSIONS: dict[str, dict[str, bool]] = {
    "2.0": {key: not value for key, value in _LATER.items()} | {"ff_bias": True},
    "2.3": _LATER | {"ff_bias": True},
    "2.5": _LATER | {"ff_bias": False},
}
# Settings that all supported versions share.
_FIXED_TRANSFORMER_KEYS = (
    *("patch_size", "patch_size_t", "audio_patch_size", "audio_patch_size_t", "vae_scale_factors", "causal_offset"),
    *("qk_norm", "activation_fn", "norm_elementwise_affine", "attention_bias", "attention_out_bias"),
    *("timestep_scale_multiplier", "cross_attn_timestep_scale_multiplier"),
    *("audio_ff_bias", "use_prompt_adaln_single"),
)
_FIXED_AUDIO_VAE_KEYS = (
    *("output_channels", "norm_type", "causality_axis", "attn_resolutions", "mid_block_add_attention"),
)
_KIND = re.compile(r"(?<![a-z])(distilled|dev)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Ltx2Config:
    """The configuration of an LTX-2 model.

    Attributes:
        transformer: Settings of LTX2VideoTransformer3DModel, every key present, as in all of these.
        connectors: Settings of LTX2TextConnectors.
        text_encoder: Settings of the language model (`text_config`) of Gemma3ForConditionalGeneration, or, for LTX-2.5,
            of Gemma4UnifiedForConditionalGeneration.
        vae: Settings of AutoencoderKLLTX2Video.
        audio_vae: Settings of AutoencoderKLLTX2Audio.
        vocoder: Settings of LTX2Vocoder or LTX2VocoderWithBWE, with its class's name under "_class_name".
        scheduler: Settings of FlowMatchEulerDiscreteScheduler.
        upsampler: Settings of LTX2LatentUpsamplerModel, for a second stage at twice the size; None without one.
        diffusion_decoder: Settings of LTX2VideoDiffusionDecoderModel, if wan_tpu.json chooses that decoder; None for
            the VAE's own.
        duration_head: Settings of LTX2DurationHead, which chooses a video's length by its prompt; None without one.
        distilled: Whether it is sampled in a few steps without guidance, as stated by wan_tpu.json, else by an
            unshifted scheduler, else by the checkpoint's name.
    """

    transformer: dict[str, Any]
    connectors: dict[str, Any]
    text_encoder: dict[str, Any]
    vae: dict[str, Any]
    audio_vae: dict[str, Any]
    vocoder: dict[str, Any]
    scheduler: dict[str, Any]
    upsampler: dict[str, Any] | None = None
    diffusion_decoder: dict[str, Any] | None = None
    duration_head: dict[str, Any] | None = None
    distilled: bool = False


def is_23(config: Ltx2Config) -> bool:
    """Return whether a model is LTX-2.3 or LTX-2.5; otherwise it is LTX-2.0."""
    return bool(config.transformer["cross_attn_mod"])


def is_25(config: Ltx2Config) -> bool:
    """Return whether a model is LTX-2.5."""
    return not config.transformer["ff_bias"]


def read_config(checkpoint: Checkpoint) -> Ltx2Config:
    """Read a checkpoint's configuration.

    Raises:
        CheckpointError: LTX-2 pipelines, or this project, don't support the configuration.
    """
    for component in ("tokenizer", *_CLASSES):
        if not checkpoint.has(component):
            raise CheckpointError(f"{checkpoint.source} has no {component}; give a complete LTX-2 checkpoint")
    for component, names in _CLASSES.items():
        if checkpoint.class_name(component) not in names:
            raise CheckpointError(
                f"{checkpoint.source} has {component} {checkpoint.class_name(component)}; supported: "
                f"{' or '.join(names)}, of LTX-2.0, 2.3 and 2.5"
            )
    transformer = complete_config(checkpoint, "transformer", classes.TRANSFORMER)
    audio_vae = complete_config(checkpoint, "audio_vae", classes.AUDIO_VAE)
    vocoder_class = checkpoint.class_name("vocoder")
    vocoder = complete_config(checkpoint, "vocoder", classes.VOCODERS[vocoder_class])
    version = _find_version(checkpoint, transformer)
    _check_version(checkpoint, transformer, version)
    same = {key: classes.TRANSFORMER[key] for key in _FIXED_TRANSFORMER_KEYS}
    check_supported(checkpoint, "transformer", transformer, same | {"rope_type": "split"}, {})
    same = {key: classes.AUDIO_VAE[key] for key in _FIXED_AUDIO_VAE_KEYS}
    check_supported(checkpoint, "audio_vae", audio_vae, same, {})
    _check_sound(checkpoint, transformer, audio_vae, vocoder)
    scheduler = _read_scheduler(checkpoint)
    distilled = _is_distilled(checkpoint, version, scheduler)
    return Ltx2Config(
        transformer=transformer,
        connectors=complete_config(checkpoint, "connectors", classes.CONNECTORS),
        text_encoder=_read_text_config(checkpoint),
        vae=complete_config(checkpoint, "vae", classes.VAE),
        audio_vae=audio_vae,
        vocoder={"_class_name": vocoder_class} | vocoder,
        scheduler=scheduler,
        upsampler=_read_upsampler(checkpoint),
        diffusion_decoder=_read_diffusion_decoder(checkpoint),
        duration_head=_read_duration_head(checkpoint),
        distilled=distilled,
    )


def _find_version(checkpoint: Checkpoint, transformer: dict[str, Any]) -> str:
    for version, values in _VERSIONS.items():
        if all(transformer[key] == value for key, value in values.items()):
            return version
    switches = ", ".join(f"{key} {transformer[key]!r}" for key in next(iter(_VERSIONS.values())))
    raise CheckpointError(
        f"{checkpoint.source} has a transformer with {switches}; supported: LTX-2.0, where the first and the last are "
        "true, LTX-2.3, where only the first is false, and LTX-2.5, where both are false"
    )


def _check_version(checkpoint: Checkpoint, transformer: dict[str, Any], version: str) -> None:
    """Check that a model has the text encoder of its version, and no marker before LTX-2.5."""
    expected, encoder = _GEMMA_4 if version == "2.5" else _GEMMA_3, checkpoint.class_name("text_encoder")
    if encoder != expected:
        raise CheckpointError(
            f"{checkpoint.source} has text_encoder {encoder}; LTX-{version}, whose transformer it has, needs {expected}"
        )
    if transformer["use_keyframes_abs_pos_embedding"] and version != "2.5":
        raise CheckpointError(
            f"{checkpoint.source} has transformer use_keyframes_abs_pos_embedding True; supported: False before LTX-2.5"
        )


def _check_sound(
    checkpoint: Checkpoint, transformer: dict[str, Any], audio_vae: dict[str, Any], vocoder: dict[str, Any]
) -> None:
    """Check that the parts which make sound fit together."""
    channels = audio_vae["latent_channels"] * audio_vae["mel_bins"] // 4
    expected = {
        "transformer audio_in_channels": (transformer["audio_in_channels"], channels),
        "audio_vae base_channels": (audio_vae["base_channels"], channels),
        "vocoder in_channels": (vocoder["in_channels"], audio_vae["output_channels"] * audio_vae["mel_bins"]),
        "vocoder out_channels": (vocoder["out_channels"], 2),
    }
    for name, (value, fitting) in expected.items():
        if value != fitting:
            raise CheckpointError(
                f"{checkpoint.source} has {name} {value}; with an audio_vae of {audio_vae['latent_channels']} latent "
                f"channels and {audio_vae['mel_bins']} mel_bins it must be {fitting}"
            )


def _read_scheduler(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config("scheduler", "scheduler_config.json")
    scheduler = classes.SCHEDULER | {key: value for key, value in config.items() if not key.startswith("_")}
    free = ("use_dynamic_shifting", "shift_terminal")
    same = {key: value for key, value in FLOW_MATCH_EULER.items() if key not in free}
    check_supported(checkpoint, "scheduler", scheduler, same | {"time_shift_type": "exponential", "shift": 1.0}, {})
    return scheduler


def _read_text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config("text_encoder").get("text_config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{checkpoint.source}/text_encoder/config.json has no text_config, which Gemma's has; fetch it again"
        )
    return classes.TEXT_ENCODERS[checkpoint.class_name("text_encoder")] | config


def _read_upsampler(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if not (checkpoint.path(_UPSAMPLER) / "config.json").is_file():
        return None
    return complete_config(checkpoint, _UPSAMPLER, classes.UPSAMPLER)


def _read_duration_head(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if not checkpoint.has(_DURATION_HEAD):
        return None
    return complete_config(checkpoint, _DURATION_HEAD, classes.DURATION_HEAD)


def _read_diffusion_decoder(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the settings of the diffusion decoder if wan_tpu.json chooses it."""
    chosen = checkpoint.read_settings("model", "decoder").get("decoder", DECODERS[0])
    if chosen not in DECODERS:
        raise CheckpointError(
            f"{checkpoint.folder / SETTINGS} has decoder {chosen!r}; supported: {', '.join(DECODERS)}"
        )
    if chosen == DECODERS[0]:
        return None
    if not (checkpoint.path(_DIFFUSION_DECODER) / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint.folder / SETTINGS} has decoder {chosen!r}, but {checkpoint.source} has no "
            f"{_DIFFUSION_DECODER}; fetch it, or leave the decoder out"
        )
    return complete_config(checkpoint, _DIFFUSION_DECODER, classes.DIFFUSION_DECODER)


def _is_distilled(checkpoint: Checkpoint, version: str, scheduler: dict[str, Any]) -> bool:
    """Return whether wan_tpu.json names a distilled model; without that, whether the scheduler or a name says so."""
    model = checkpoint.read_settings("model", "decoder").get("model")
    if model is not None:
        if model not in MODELS:
            raise CheckpointError(f"{checkpoint.folder / SETTINGS} has model {model!r}; supported: {', '.join(MODELS)}")
        if model.removesuffix("-distilled") != {"2.0": "ltx-2"}.get(version, f"ltx-{version}"):
            raise CheckpointError(
                f"{checkpoint.folder / SETTINGS} has model {model!r}, but the checkpoint's configuration is that of "
                f"LTX-{version}; correct it"
            )
        return str(model).endswith("-distilled")
    if not scheduler["use_dynamic_shifting"]:
        return True
    for name in checkpoint.names:
        if len(kinds := {kind.lower() for kind in _KIND.findall(name)}) == 1:
            return kinds == {"distilled"}
    return False
