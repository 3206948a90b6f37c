"""The configuration of a MiniMax-H3 model, read from a checkpoint or as published."""

from dataclasses import dataclass
from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.minimax_h3 import classes
from wan_tpu.families.shared.settings import complete_config

MODELS = ("minimax-h3",)  # The published models, as wan_tpu.json may name them.
TEXT_LAYER = 50  # The layer of Qwen3-VL whose output the published model was trained with.
_CLASSES = {
    "transformer": "MiniMaxH3Transformer3DModel",
    "text_encoder": "Qwen3VLForConditionalGeneration",
    "vae": "AutoencoderKLMiniMaxH3",
    "audio_vae": "AutoencoderKLMiniMaxH3Audio",
    "scheduler": "MiniMaxH3Scheduler",
    "audio_scheduler": "MiniMaxH3Scheduler",
}


@dataclass(frozen=True)
class MiniMaxH3Config:
    """The configuration of a MiniMax-H3 model.

    Attributes:
        transformer: Of MiniMaxH3Transformer3DModel, every key present.
        text_encoder: Of Qwen3-VL's language model (`text_config` of Qwen3VLForConditionalGeneration).
        vision: Of its vision tower (`vision_config`).
        vae: Of AutoencoderKLMiniMaxH3.
        audio_vae: Of AutoencoderKLMiniMaxH3Audio.
        scheduler: Of the video's MiniMaxH3Scheduler.
        audio_scheduler: Of the sound's.
        text_layer: The layer of the language model whose output is the text's embedding, without the final norm.
    """

    transformer: dict[str, Any]
    text_encoder: dict[str, Any]
    vision: dict[str, Any]
    vae: dict[str, Any]
    audio_vae: dict[str, Any]
    scheduler: dict[str, Any]
    audio_scheduler: dict[str, Any]
    text_layer: int = TEXT_LAYER


def read_config(checkpoint: Checkpoint) -> MiniMaxH3Config:
    """Read a checkpoint's configuration.

    Raises:
        CheckpointError: MiniMax-H3's pipeline, or this project, doesn't run it.
    """
    for component in ("tokenizer", *_CLASSES):
        if not checkpoint.has(component):
            raise CheckpointError(f"{checkpoint.source} has no {component}; give a complete MiniMax-H3 checkpoint")
    for component, name in _CLASSES.items():
        if checkpoint.class_name(component) != name:
            raise CheckpointError(
                f"{checkpoint.source} has {component} {checkpoint.class_name(component)}; supported is {name}"
            )
    text, vision = (_read_encoder(checkpoint, key) for key in ("text_config", "vision_config"))
    layers = text["num_hidden_layers"]
    audio_vae = complete_config(checkpoint, "audio_vae", classes.AUDIO_VAE)
    channels = audio_vae["latent_channels"]
    for name, neutral in (("latents_mean", 0.0), ("latents_std", 1.0)):
        audio_vae[name] = audio_vae[name] or [neutral] * channels
    return MiniMaxH3Config(
        transformer=complete_config(checkpoint, "transformer", classes.TRANSFORMER),
        text_encoder=classes.TEXT | text,
        vision=classes.VISION | vision,
        vae=complete_config(checkpoint, "vae", classes.VAE),
        audio_vae=audio_vae,
        scheduler=_read_scheduler(checkpoint, "scheduler"),
        audio_scheduler=_read_scheduler(checkpoint, "audio_scheduler"),
        text_layer=min(TEXT_LAYER, layers - 1),
    )


def _read_encoder(checkpoint: Checkpoint, part: str) -> dict[str, Any]:
    config = checkpoint.config("text_encoder").get(part)
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{checkpoint.source}/text_encoder/config.json has no {part}, as Qwen3-VL's has; fetch it again"
        )
    return config


def _read_scheduler(checkpoint: Checkpoint, component: str) -> dict[str, Any]:
    config = checkpoint.config(component, "scheduler_config.json")
    return classes.SCHEDULER | {key: value for key, value in config.items() if not key.startswith("_")}
