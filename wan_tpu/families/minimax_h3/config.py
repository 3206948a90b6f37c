"""The configuration of a MiniMax-H3 model, read from a checkpoint or as published."""

import math
from dataclasses import dataclass, field
from typing import Any

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.minimax_h3 import classes, fasth3
from wan_tpu.families.shared.settings import check_supported, complete_config

# Rows for a prompt and the labels of its keyframes: the fewest that hold them are used, each with programs of its own.
# MiniMax's service takes 7,000 characters, about 1,500 tokens in English and 5,100 in Chinese.
TEXT_ROWS = (1024, 2048, 4096, 6144)
LABEL = "<Picture {}>: "  # What the text encoder reads before a keyframe, counted from 1.
REFERENCE_FOLDER = "transformer_ref"  # The transformer for requests with references.
TEXT_LAYER = 50  # The layer of Qwen3-VL whose output the published model was trained with.
FPS = 24  # The only frame rate that the model was trained on.
STRIDE = 16  # Pixels per pixel of the latents, four of which are a token.
LATENTS_PER_S = 40  # Latents of the sound per second. diffusers computes with this number, whatever the VAE's strides.
_CLASSES = {
    "transformer": "MiniMaxH3Transformer3DModel",
    "text_encoder": "Qwen3VLForConditionalGeneration",
    "vae": "AutoencoderKLMiniMaxH3",
    "audio_vae": "AutoencoderKLMiniMaxH3Audio",
    "scheduler": "MiniMaxH3Scheduler",
    "audio_scheduler": "MiniMaxH3Scheduler",
}
# Settings of the VAE that the sizes of videos and the cutting into clips rest on.
_FIXED_VAE_KEYS = ("in_channels", "out_channels", "spatial_padding_mode", "clip_length", "token_drop")
_FIXED_TEXT_KEYS = ("hidden_act", "attention_bias")
_FIXED_VISION_KEYS = ("hidden_act", "in_channels", "patch_size", "spatial_merge_size", "temporal_patch_size")
_ROPE = {"rope_type": "default", "mrope_interleaved": True}
# Of the image processor: files that have its settings, in the order in which transformers looks for them; settings that
# the vision tower needs; and its limits, with their names in older files.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_PROCESSOR = {"patch_size": 16, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_OLDER_LIMITS = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


@dataclass(frozen=True)
class MiniMaxH3Config:
    """The configuration of a MiniMax-H3 model.

    Attributes:
        transformer: Settings of MiniMaxH3Transformer3DModel, every key present, as in all of these.
        text_encoder: Settings of Qwen3-VL's language model (`text_config` of Qwen3VLForConditionalGeneration).
        vision: Settings of its vision tower (`vision_config`).
        vae: Settings of AutoencoderKLMiniMaxH3.
        audio_vae: Settings of AutoencoderKLMiniMaxH3Audio.
        scheduler: Settings of the video's MiniMaxH3Scheduler.
        audio_scheduler: Settings of the sound's scheduler.
        text_layer: The layer of the language model whose output is the text's embedding, without the final norm.
        fasth3: What the transformer was distilled for, if it has the gates of video sparse attention; None without.
        picture: The pixels of the smallest and the largest image that the vision tower sees, by the names of Qwen3-VL's
            image processor.
        canvas: The sizes of videos and images that are references, by the names of `classes.CANVAS`; None if the
            checkpoint lacks the transformer for references.
    """

    transformer: dict[str, Any]
    text_encoder: dict[str, Any]
    vision: dict[str, Any]
    vae: dict[str, Any]
    audio_vae: dict[str, Any]
    scheduler: dict[str, Any]
    audio_scheduler: dict[str, Any]
    text_layer: int = TEXT_LAYER
    fasth3: "fasth3.FastH3 | None" = None
    picture: dict[str, int] = field(default_factory=lambda: dict(classes.PICTURE))
    canvas: dict[str, int] | None = field(default_factory=lambda: dict(classes.CANVAS))

    @property
    def reference_edge(self) -> int:
        """The short side of a reference image, in pixels."""
        assert self.canvas is not None
        return self.canvas["reference_image_short_edge"]

    @property
    def short_edge(self) -> int:
        """The short side of a reference video, in pixels."""
        assert self.canvas is not None
        return self.canvas["canvas_short_edge"]

    @property
    def most_pixels(self) -> int:
        """The most pixels of a frame of a reference video."""
        assert self.canvas is not None
        return self.canvas["canvas_max_pixels"]


def count_voices(frames: int) -> int:
    """Return the latents of each channel of the sound of so many frames."""
    return round(frames / FPS * LATENTS_PER_S)


def fit_rows(tokens: int) -> int:
    """Return the rows for a text with that many tokens; the most that there are if it must be cut."""
    return next((rows for rows in TEXT_ROWS if rows >= tokens), TEXT_ROWS[-1])


def read_config(checkpoint: Checkpoint) -> MiniMaxH3Config:
    """Read a checkpoint's configuration.

    Raises:
        CheckpointError: MiniMax-H3's pipeline, or this project, doesn't support the configuration.
    """
    for component in ("tokenizer", *_CLASSES):
        if not checkpoint.has(component):
            raise CheckpointError(f"{checkpoint.source} has no {component}; give a complete MiniMax-H3 checkpoint")
    for component, name in _CLASSES.items():
        if checkpoint.class_name(component) != name:
            raise CheckpointError(
                f"{checkpoint.source} has {component} {checkpoint.class_name(component)}; supported: {name}"
            )
    contract = fasth3.read_contract(checkpoint)
    text = _read_text(checkpoint)
    text_layer = min(TEXT_LAYER, text["num_hidden_layers"] - 1)
    return MiniMaxH3Config(
        transformer=_read_transformer(checkpoint),
        text_encoder=text,
        vision=_read_vision(checkpoint, text["hidden_size"], text_layer),
        vae=_read_vae(checkpoint),
        audio_vae=_read_audio_vae(checkpoint),
        scheduler=_read_scheduler(checkpoint, "scheduler", contract.get("video_scheduler_shift")),
        audio_scheduler=_read_scheduler(checkpoint, "audio_scheduler", contract.get("audio_scheduler_shift")),
        text_layer=text_layer,
        fasth3=fasth3.read_fasth3(checkpoint, contract),
        picture=_read_picture(checkpoint),
        canvas=_read_canvas(checkpoint),
    )


def _read_transformer(checkpoint: Checkpoint) -> dict[str, Any]:
    config = complete_config(checkpoint, "transformer", classes.TRANSFORMER)
    check_supported(checkpoint, "transformer", config, {"patch_size": classes.TRANSFORMER["patch_size"]}, {})
    rotated = 6 * config["rope_freq_dim"]  # Of each head: pairs for time, height and width.
    if rotated > config["attention_head_dim"]:
        raise CheckpointError(
            f"{checkpoint.source} has transformer rope_freq_dim {config['rope_freq_dim']}; with attention_head_dim "
            f"{config['attention_head_dim']} it must be at most {config['attention_head_dim'] // 6}"
        )
    return config


def _read_vae(checkpoint: Checkpoint) -> dict[str, Any]:
    config = complete_config(checkpoint, "vae", classes.VAE)
    check_supported(checkpoint, "vae", config, {key: classes.VAE[key] for key in _FIXED_VAE_KEYS}, {})
    for key in ("spatial_downsample_factors", "temporal_downsample_factors"):
        factor, expected = math.prod(config[key]), math.prod(classes.VAE[key])
        if factor != expected:
            raise CheckpointError(
                f"{checkpoint.source} has vae {key} {config[key]}, {factor} in all; supported: {expected}"
            )
    _check_statistics(checkpoint, "vae", config)
    return config


def _read_audio_vae(checkpoint: Checkpoint) -> dict[str, Any]:
    config = complete_config(checkpoint, "audio_vae", classes.AUDIO_VAE)
    for key, neutral in (("latents_mean", 0.0), ("latents_std", 1.0)):
        config[key] = config[key] or [neutral] * config["latent_channels"]
    for key in ("encoder_rates", "decoder_rates"):
        if (stride := math.prod(config[key])) * LATENTS_PER_S != config["sampling_rate"]:
            raise CheckpointError(
                f"{checkpoint.source} has audio_vae {key} {config[key]}, {stride} samples a latent; with "
                f"sampling_rate {config['sampling_rate']} it must be {config['sampling_rate'] / LATENTS_PER_S:g}"
            )
    _check_statistics(checkpoint, "audio_vae", config)
    return config


def _check_statistics(checkpoint: Checkpoint, component: str, config: dict[str, Any]) -> None:
    for key in ("latents_mean", "latents_std"):
        if len(config[key]) != config["latent_channels"]:
            raise CheckpointError(
                f"{checkpoint.source} has {component} {key} of {len(config[key])} numbers; with latent_channels "
                f"{config['latent_channels']} give as many"
            )


def _read_text(checkpoint: Checkpoint) -> dict[str, Any]:
    config = _read_encoder(checkpoint, "text_config")
    text = {key: config.get(key, default) for key, default in classes.TEXT.items()}
    check_supported(checkpoint, "text_encoder", text, {key: classes.TEXT[key] for key in _FIXED_TEXT_KEYS}, {})
    # Files that transformers 4 wrote have its older names.
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta"), **config.get("rope_scaling", {})}
    check_supported(checkpoint, "text_encoder", rope, {"rope_type": "default", "mrope_interleaved": False}, _ROPE)
    section, half = rope.get("mrope_section") or [], text["head_dim"] // 2
    if sum(section) != half or len(section) != 3 or rope.get("rope_theta") is None:
        raise CheckpointError(
            f"{checkpoint.source} has text_encoder rope_theta {rope.get('rope_theta')} and mrope_section {section}; "
            f"with head_dim {text['head_dim']} the section must be three numbers whose sum is {half}"
        )
    return text | {"rope_parameters": {"rope_theta": float(rope["rope_theta"]), "mrope_section": section, **_ROPE}}


def _read_vision(checkpoint: Checkpoint, width: int, text_layer: int) -> dict[str, Any]:
    config = _read_encoder(checkpoint, "vision_config")
    vision = {key: config.get(key, default) for key, default in classes.VISION.items()}
    check_supported(checkpoint, "text_encoder", vision, {key: classes.VISION[key] for key in _FIXED_VISION_KEYS}, {})
    if vision["out_hidden_size"] != width:
        raise CheckpointError(
            f"{checkpoint.source} has text_encoder out_hidden_size {vision['out_hidden_size']} in its "
            f"vision_config; it must be {width}, the hidden_size of its text_config"
        )
    indexes = vision["deepstack_visual_indexes"]
    if len(indexes) > text_layer or max(indexes, default=0) >= vision["depth"]:
        raise CheckpointError(
            f"{checkpoint.source} has text_encoder deepstack_visual_indexes {indexes}; supported: at most "
            f"{text_layer}, of the {vision['depth']} layers of its vision tower"
        )
    return vision


def _read_encoder(checkpoint: Checkpoint, part: str) -> dict[str, Any]:
    config = checkpoint.config("text_encoder").get(part)
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{checkpoint.source}/text_encoder/config.json has no {part}, which Qwen3-VL's has; fetch it again"
        )
    return config


def _read_picture(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the limits of the image processor; the published ones if the checkpoint has none."""
    files = [file for file in _PROCESSOR_FILES if (checkpoint.path("processor") / file).is_file()]
    if not files:
        return dict(classes.PICTURE)
    config = checkpoint.config("processor", files[0])
    config = config.get("image_processor", config)
    check_supported(checkpoint, "processor", config, classes.PROCESSOR, _PROCESSOR)
    size = config.get("size") or {}
    picture = {key: config.get(old, size.get(key)) for key, old in _OLDER_LIMITS.items()}
    if not all(isinstance(limit, int) and limit > 0 for limit in picture.values()):
        raise CheckpointError(
            f"{checkpoint.source} has processor size {size}; give something like {classes.PICTURE}, in pixels"
        )
    return picture


def _read_canvas(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Return the sizes of references; None without a transformer for them, which computes as the other one does."""
    if not checkpoint.has(REFERENCE_FOLDER):
        return None
    if not (checkpoint.path(REFERENCE_FOLDER) / "config.json").is_file():
        return None
    config = complete_config(checkpoint, REFERENCE_FOLDER, classes.TRANSFORMER)
    expected = complete_config(checkpoint, "transformer", classes.TRANSFORMER)
    if differing := sorted(key for key in classes.TRANSFORMER if config[key] != expected[key]):
        raise CheckpointError(
            f"{checkpoint.source} has {REFERENCE_FOLDER} with another {', '.join(differing)} than transformer; give a "
            "checkpoint whose components belong together"
        )
    return {key: int(checkpoint.index.get(key, default)) for key, default in classes.CANVAS.items()}


def _read_scheduler(checkpoint: Checkpoint, component: str, shift: float | None) -> dict[str, Any]:
    config = checkpoint.config(component, "scheduler_config.json")
    settings = classes.SCHEDULER | {key: value for key, value in config.items() if not key.startswith("_")}
    return settings if shift is None else settings | {"shift": float(shift)}
