"""Reads a Wan checkpoint's configuration, and checks that this project runs it."""

import re
from collections.abc import Iterable
from typing import Any

from wan_tpu.checkpoint import SETTINGS, Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.shared.settings import (
    ENCODERS,
    FLOW_MATCH_EULER,
    UNIPC,
    check_components,
    check_supported,
    complete_config,
)
from wan_tpu.families.wan.published import PUBLISHED, TRANSFORMER_14B, VAE_21, WanConfig

# Settings of published VAEs that diffusers' class never had, and warns about.
_IGNORED_SETTINGS = ("clip_output",)
_RESOLUTION = re.compile(r"(?<!\d)(480|720)p", re.IGNORECASE)


def read_config(checkpoint: Checkpoint) -> WanConfig:
    """Read a checkpoint's configuration.

    Raises:
        CheckpointError: Wan pipelines, or this project, don't support the configuration.
    """
    index = checkpoint.index
    check_components(checkpoint, ("tokenizer", "text_encoder", "transformer", "scheduler"), {"vae": "AutoencoderKLWan"})
    two_experts = checkpoint.has("transformer_2")
    if two_experts and index.get("boundary_ratio") is None:
        raise CheckpointError(f"{checkpoint.source} has two experts but no boundary_ratio in model_index.json")
    transformer = complete_config(checkpoint, "transformer", TRANSFORMER_14B)
    if two_experts:
        _check_same_shapes(checkpoint, transformer, complete_config(checkpoint, "transformer_2", TRANSFORMER_14B))
    _check_attention(checkpoint, transformer)
    boundary = index.get("boundary_ratio") if two_experts else None
    if boundary is not None and not (isinstance(boundary, int | float) and 0 < boundary < 1):
        raise CheckpointError(f"{checkpoint.source} has boundary_ratio {boundary!r}; it must lie between 0 and 1")
    expand_timesteps = index.get("expand_timesteps") or False
    if not isinstance(expand_timesteps, bool):
        raise CheckpointError(
            f"{checkpoint.source} has expand_timesteps {expand_timesteps!r}; it must be true or false"
        )
    vae = complete_config(checkpoint, "vae", VAE_21)
    solver, shift = _read_scheduler(checkpoint)
    text_encoder_class = checkpoint.class_name("text_encoder")
    image_encoder, image_encoder_class = None, None
    if checkpoint.has("image_encoder"):
        image_encoder_class = checkpoint.class_name("image_encoder")
        image_encoder = complete_config(checkpoint, "image_encoder", ENCODERS.get(image_encoder_class, {}))
    return WanConfig(
        transformer=transformer,
        vae={key: value for key, value in vae.items() if key not in _IGNORED_SETTINGS},
        text_encoder=complete_config(checkpoint, "text_encoder", ENCODERS.get(text_encoder_class, {})),
        image_encoder=image_encoder,
        text_encoder_class=text_encoder_class,
        image_encoder_class=image_encoder_class,
        boundary_ratio=boundary,
        expand_timesteps=expand_timesteps,
        shift=shift,
        solver=solver,
        resolution=_read_resolution(checkpoint),
    )


def read_model_name(checkpoint: Checkpoint) -> str | None:
    """Return the published model that wan_tpu.json names, which tells apart models whose files are the same."""
    name = checkpoint.read_settings("model").get("model")
    if name is not None and name not in list(PUBLISHED):
        raise CheckpointError(f"{checkpoint.folder / SETTINGS} has model {name!r}; supported: {', '.join(PUBLISHED)}")
    return name


def _check_same_shapes(checkpoint: Checkpoint, high: dict[str, Any], low: dict[str, Any]) -> None:
    differing = sorted(key for key in {*high, *low} if high.get(key) != low.get(key))
    if differing:
        differences = "; ".join(f"{key} is {high.get(key)!r} and {low.get(key)!r}" for key in differing)
        raise CheckpointError(
            f"{checkpoint.source} has experts of different shapes: of transformer and transformer_2, {differences}; "
            "the experts of a model share their programs. Of a published model, take another revision"
        )


def _check_attention(checkpoint: Checkpoint, transformer: dict[str, Any]) -> None:
    attention, density = transformer.get("attention"), transformer.get("kept_blocks")
    if attention not in (None, "sla"):
        raise CheckpointError(
            f"{checkpoint.source} has attention {attention!r} in transformer/config.json; supported: 'sla', or no "
            "entry for attention to all keys"
        )
    if attention is not None and not (isinstance(density, int | float) and 0 < density <= 1):
        raise CheckpointError(
            f"{checkpoint.source} has kept_blocks {density!r} in transformer/config.json; with sla it must be the "
            "share of key blocks to keep, above 0 and at most 1"
        )


def _read_resolution(checkpoint: Checkpoint) -> str:
    """Return "480p" or "720p" if wan_tpu.json or a name of the checkpoint says so; the first such name decides."""
    model = read_model_name(checkpoint)
    names: Iterable[str] = checkpoint.names if model is None else [PUBLISHED[model].resolution]
    for name in names:
        heights = {match.lower() for match in _RESOLUTION.findall(name)}
        if len(heights) == 1:
            return f"{heights.pop()}p"
    return ""


def _read_scheduler(checkpoint: Checkpoint) -> tuple[str, float]:
    """Return the solver of the scheduler's class, and its shift."""
    config = checkpoint.config("scheduler", "scheduler_config.json")
    name = config.get("_class_name")
    if name == "UniPCMultistepScheduler":
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        check_supported(checkpoint, "scheduler", config, UNIPC, flow)
        return "unipc", float(config.get("flow_shift", 1.0))
    if name == "FlowMatchEulerDiscreteScheduler":
        check_supported(checkpoint, "scheduler", config, FLOW_MATCH_EULER, {})
        return "euler", float(config.get("shift", 1.0))
    raise CheckpointError(
        f"{checkpoint.source} has scheduler {name}; supported: UniPCMultistepScheduler with "
        "use_flow_sigmas and FlowMatchEulerDiscreteScheduler"
    )
