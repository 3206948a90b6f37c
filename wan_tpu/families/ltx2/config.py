"""The configuration of an LTX-2 model, from a checkpoint or as published."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ltx2Config:
    """The configuration of an LTX-2 model.

    Attributes:
        transformer: Of LTX2VideoTransformer3DModel, every key present.
        connectors: Of LTX2TextConnectors.
        text_encoder: Of Gemma 3's language model (`text_config` of Gemma3ForConditionalGeneration).
        vae: Of AutoencoderKLLTX2Video.
        audio_vae: Of AutoencoderKLLTX2Audio.
        vocoder: Of LTX2Vocoder or LTX2VocoderWithBWE, with its class's name under "_class_name".
        scheduler: Of FlowMatchEulerDiscreteScheduler.
        upsampler: Of LTX2LatentUpsamplerModel, for a second stage at twice the size; None without one.
        distilled: Whether it is sampled in a few steps without guidance. No file says so: the name does, or wan_tpu.json.
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
