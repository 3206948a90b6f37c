"""The configuration of an LTX-2 model, from a checkpoint or as published."""

import re
from dataclasses import dataclass
from typing import Any

from wan_tpu.checkpoint import SETTINGS, Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.ltx2 import classes
from wan_tpu.families.shared.settings import FLOW_MATCH_EULER, check_supported, complete_config

# The published models, as wan_tpu.json may name them.
MODELS = ("ltx-2", "ltx-2-distilled", "ltx-2.3", "ltx-2.3-distilled")
_UPSAMPLER = "latent_upsampler"  # The index doesn't name this folder, which belongs to another pipeline of diffusers.
_CLASSES = {
    "transformer": ("LTX2VideoTransformer3DModel",),
    "connectors": ("LTX2TextConnectors",),
    "text_encoder": ("Gemma3ForConditionalGeneration",),
    "vae": ("AutoencoderKLLTX2Video",),
    "audio_vae": ("AutoencoderKLLTX2Audio",),
    "vocoder": tuple(classes.VOCODERS),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
}
# Keys of the transformer's configuration that distinguish the versions.
_VERSIONS: dict[str, dict[str, bool]] = {
    "2.0": {
        "use_prompt_embeddings": True,
        "cross_attn_mod": False,
        "audio_cross_attn_mod": False,
        "gated_attn": False,
        "audio_gated_attn": False,
    },
    "2.3": {
        "use_prompt_embeddings": False,
        "cross_attn_mod": True,
        "audio_cross_attn_mod": True,
        "gated_attn": True,
        "audio_gated_attn": True,
    },
}
# Settings that all supported versions share; LTX-2.5 changes the last four.
_FIXED_TRANSFORMER_KEYS = (
    *("patch_size", "patch_size_t", "audio_patch_size", "audio_patch_size_t", "vae_scale_factors", "causal_offset"),
    *("qk_norm", "activation_fn", "norm_elementwise_affine", "attention_bias", "attention_out_bias"),
    *("timestep_scale_multiplier", "cross_attn_timestep_scale_multiplier"),
    *("ff_bias", "audio_ff_bias", "use_prompt_adaln_single", "use_keyframes_abs_pos_embedding"),
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
        text_encoder: Settings of Gemma 3's language model (`text_config` of Gemma3ForConditionalGeneration).
        vae: Settings of AutoencoderKLLTX2Video.
        audio_vae: Settings of AutoencoderKLLTX2Audio.
        vocoder: Settings of LTX2Vocoder or LTX2VocoderWithBWE, with its class's name under "_class_name".
        scheduler: Settings of FlowMatchEulerDiscreteScheduler.
        upsampler: Settings of LTX2LatentUpsamplerModel, for a distilled model's second stage at twice the size; None
            without one.
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
    distilled: bool = False


def is_23(config: Ltx2Config) -> bool:
    """Return whether a model is LTX-2.3; otherwise it is LTX-2.0."""
    return bool(config.transformer["cross_attn_mod"])


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
                f"{' or '.join(names)}, of LTX-2.0 and 2.3"
            )
    transformer = complete_config(checkpoint, "transformer", classes.TRANSFORMER)
    audio_vae = complete_config(checkpoint, "audio_vae", classes.AUDIO_VAE)
    vocoder_class = checkpoint.class_name("vocoder")
    vocoder = complete_config(checkpoint, "vocoder", classes.VOCODERS[vocoder_class])
    version = _find_version(checkpoint, transformer)
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
        upsampler=_read_upsampler(checkpoint) if distilled else None,
        distilled=distilled,
    )


def _find_version(checkpoint: Checkpoint, transformer: dict[str, Any]) -> str:
    for version, values in _VERSIONS.items():
        if all(transformer[key] == value for key, value in values.items()):
            return version
    switches = ", ".join(f"{key} {transformer[key]!r}" for key in next(iter(_VERSIONS.values())))
    raise CheckpointError(
        f"{checkpoint.source} has a transformer with {switches}; supported: LTX-2.0, where only the first is true, "
        "and LTX-2.3, where it alone is false"
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
            f"{checkpoint.source}/text_encoder/config.json has no text_config, which Gemma 3's has; fetch it again"
        )
    return {"vocab_size": 262208} | config


def _read_upsampler(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if not (checkpoint.path(_UPSAMPLER) / "config.json").is_file():
        return None
    return complete_config(checkpoint, _UPSAMPLER, classes.UPSAMPLER)


def _is_distilled(checkpoint: Checkpoint, version: str, scheduler: dict[str, Any]) -> bool:
    """Return whether wan_tpu.json names a distilled model; without that, whether the scheduler or a name says so."""
    model = checkpoint.read_settings("model").get("model")
    if model is not None:
        if model not in MODELS:
            raise CheckpointError(f"{checkpoint.folder / SETTINGS} has model {model!r}; supported: {', '.join(MODELS)}")
        if model.removesuffix("-distilled") != {"2.0": "ltx-2", "2.3": "ltx-2.3"}[version]:
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
