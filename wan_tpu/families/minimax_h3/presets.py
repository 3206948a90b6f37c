"""The published MiniMax-H3: its configuration, to compile it without weights, and its sampling settings.

Sources: the classes of diffusers 0.42.1 and their modular pipeline (modular_pipelines/minimax_h3), whose defaults are
those of MiniMaxAI/MiniMax-H3 on the Hugging Face hub, and Qwen/Qwen3-VL-32B-Instruct for the text encoder.
"""

from typing import Any

from wan_tpu.families.minimax_h3 import classes
from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.request import Defaults

CUSTOM = "a custom MiniMax-H3"
STEPS = 49  # Diffusers' 50 points of its schedule, whose last one is the video.

# fmt: off
# Of Qwen3-VL 32B.
TEXT: dict[str, Any] = classes.TEXT | {
    "model_type": "qwen3_vl_text", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_theta": 5000000.0, "rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = classes.VISION | {"model_type": "qwen3_vl_vision", "out_hidden_size": 5120}
# fmt: on
_CHANNELS = classes.AUDIO_VAE["latent_channels"]
PRESETS: dict[str, MiniMaxH3Config] = {
    "minimax-h3": MiniMaxH3Config(
        transformer=classes.TRANSFORMER,
        text_encoder=TEXT,
        vision=VISION,
        vae=classes.VAE,
        audio_vae=classes.AUDIO_VAE | {"latents_mean": [0.0] * _CHANNELS, "latents_std": [1.0] * _CHANNELS},
        scheduler=classes.SCHEDULER,
        audio_scheduler={"shift": 3.0},
    ),
}


def recognise(config: MiniMaxH3Config) -> str:
    """Return the name of the published model with a configuration, or `CUSTOM`."""
    for name, published in PRESETS.items():
        if config.transformer == published.transformer:
            return name
    return CUSTOM


def defaults(config: MiniMaxH3Config) -> Defaults:
    """Return a model's published sampling settings."""
    return Defaults(
        height=768,
        width=1344,
        frames=124,
        fps=24,
        steps=STEPS,
        guidance_scale=1.0,
        guidance_scale_2=1.0,
        shift=float(config.scheduler["shift"]),
        solver="euler",
        generate_audio=True,
    )
