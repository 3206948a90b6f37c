"""The rotary angles of LTX-2's tokens, computed on the host as diffusers does: they reach 15,000 rad in float32.

Every head has angles of its own. A channel's angle depends on one axis of the video (frames, height or width), so three
small tables, whose rows are added, give all tokens' angles.

Shapes: T H W latent frames, height, width, A tokens of the sound, C channels of a stream.
"""

from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed


def make_tables(
    config: dict[str, Any], grid: tuple[int, int, int], audio_tokens: int, fps: float
) -> dict[str, np.ndarray]:
    """Return tables of cosines and sines, float32 [2, positions, C], as [cos, cos] and [-sin, sin] of each head.

    Args:
        config: The transformer's configuration.
        grid: T, H, W.
        audio_tokens: A.
        fps: Frames per second of the video.

    Returns:
        "frames", "height" and "width", to be added for the video's own attention; "audio" for the sound's; "cross" and
        "cross_audio" for attention between the two, of the video's frames and of the sound.
    """
    heads, audio_heads = config["num_attention_heads"], config["audio_num_attention_heads"]
    channels, audio_channels = heads * config["attention_head_dim"], audio_heads * config["audio_attention_head_dim"]
    shared = {
        "theta": config["rope_theta"],
        "causal_offset": config["causal_offset"],
        "double_precision": config["rope_double_precision"],
        "rope_type": "split",
    }
    video_options = shared | {
        "patch_size": config["patch_size"],
        "patch_size_t": config["patch_size_t"],
        "base_height": config["base_height"],
        "base_width": config["base_width"],
        "num_attention_heads": heads,
        "modality": "video",
    }
    audio_options = shared | {
        "sampling_rate": config["audio_sampling_rate"],
        "hop_length": config["audio_hop_length"],
        "num_attention_heads": audio_heads,
        "modality": "audio",
    }
    longest = max(config["pos_embed_max_pos"], config["audio_pos_embed_max_pos"])
    video = LTX2AudioVideoRotaryPosEmbed(
        dim=channels,
        base_num_frames=config["pos_embed_max_pos"],
        scale_factors=tuple(config["vae_scale_factors"]),
        **video_options,
    )
    audio = LTX2AudioVideoRotaryPosEmbed(
        dim=audio_channels,
        base_num_frames=config["audio_pos_embed_max_pos"],
        scale_factors=(config["audio_scale_factor"],),
        **audio_options,
    )
    cross_dim = config["audio_cross_attention_dim"]
    cross = LTX2AudioVideoRotaryPosEmbed(dim=cross_dim, base_num_frames=longest, **video_options)
    cross_audio = LTX2AudioVideoRotaryPosEmbed(dim=cross_dim, base_num_frames=longest, **audio_options)

    video_coords = video.prepare_video_coords(1, *grid, torch.device("cpu"), fps=fps)
    audio_coords = audio.prepare_audio_coords(1, audio_tokens, torch.device("cpu"))
    frame, row, column = grid[1] * grid[2], grid[2], 1  # Tokens from one position of an axis to the next.
    tables = {}
    for axis, (name, stride, count) in enumerate(
        zip(("frames", "height", "width"), (frame, row, column), grid, strict=True)
    ):
        coords = video_coords[:, :, : stride * count : stride]
        tables[name] = _keep_axis(_as_tables(*video(coords)), axis, heads)
    time = video_coords[:, 0:1, ::frame]
    return tables | {
        "audio": _as_tables(*audio(audio_coords)),
        "cross": _as_tables(*cross(time)),
        "cross_audio": _as_tables(*cross_audio(audio_coords[:, 0:1])),
    }


def _as_tables(cos: torch.Tensor, sin: torch.Tensor) -> np.ndarray:
    """Return [2, positions, N*D] from cosines and sines [1, N, positions, D/2]."""
    both = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])[:, 0]
    return both.transpose(1, 2).flatten(2).numpy()


def _keep_axis(tables: np.ndarray, axis: int, heads: int) -> np.ndarray:
    """Return the tables, with zeros for channels whose angle belongs to another axis.

    Over all heads, the axes take turns, from the end of the channels; what is left in front doesn't rotate, as the
    first axis's table says.
    """
    parts, positions, channels = tables.shape
    half = np.arange(channels // 2)
    unused = len(half) % 3
    mask = np.where(half < unused, 0, (half - unused) % 3) == axis
    per_head = np.tile(mask.reshape(heads, 1, -1), (1, 2, 1))
    return (tables.reshape(parts, positions, heads, 2, -1) * per_head).reshape(tables.shape).astype(np.float32)
