"""The modulations of an LTX-2 transformer: shifts, scales and gates of every layer and of the text, from timesteps.

Shapes: M timesteps: 1, or one for each segment of the tokens where some of them are known.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from wan_tpu.runtime.bridge import Params, to_jax, to_torch


class Times(NamedTuple):
    """A step's timesteps, float32.

    Attributes:
        video: [M], of the segments of the video's tokens.
        audio: [M], of those of the sound's.
        cross_video: [1] or [M], of the video's tokens in the attention between the streams.
        cross_audio: The same of the sound's.
        video_gate: [1] or [M], of what the video's tokens take from the sound.
        audio_gate: The same of the sound's.
        text: [1], of the video's text.
        audio_text: [1], of the sound's.
    """

    video: jax.Array
    audio: jax.Array
    cross_video: jax.Array
    cross_audio: jax.Array
    video_gate: jax.Array
    audio_gate: jax.Array
    text: jax.Array
    audio_text: jax.Array


def embed_times(module: Any, times: Times, dtype: torch.dtype) -> dict[str, jax.Array]:
    """Return the timesteps' embeddings for every use, float32 [M, rows, channels], by the names of modulations.

    Args:
        module: The transformer, inside `wan_tpu.runtime.bridge.call`.
        times: The timesteps.
        dtype: The dtype to compute in.
    """
    own = Times(*map(to_torch, times))

    def embed(layer: Any, times: torch.Tensor) -> tuple[jax.Array, jax.Array]:
        modulation, embedding = layer(times, batch_size=len(times), hidden_dtype=dtype)
        rows = to_jax(modulation).astype(jnp.float32)
        return rows.reshape(len(rows), layer.num_mod_params, -1), to_jax(embedding).astype(jnp.float32)

    scale = module.config.cross_attn_timestep_scale_multiplier / module.config.timestep_scale_multiplier
    video, embedding = embed(module.time_embed, own.video)
    audio, audio_embedding = embed(module.audio_time_embed, own.audio)
    results = {
        "video": video,
        "audio": audio,
        "cross_video": embed(module.av_cross_attn_video_scale_shift, own.cross_video)[0],
        "cross_audio": embed(module.av_cross_attn_audio_scale_shift, own.cross_audio)[0],
        "cross_video_gate": embed(module.av_cross_attn_video_a2v_gate, own.video_gate * scale)[0],
        "cross_audio_gate": embed(module.av_cross_attn_audio_v2a_gate, own.audio_gate * scale)[0],
        "head": to_jax(module.scale_shift_table).astype(jnp.float32) + embedding[:, None],
        "audio_head": to_jax(module.audio_scale_shift_table).astype(jnp.float32) + audio_embedding[:, None],
    }
    if module.prompt_modulation:
        results["text"] = embed(module.prompt_adaln, own.text)[0]
        results["audio_text"] = embed(module.audio_prompt_adaln, own.audio_text)[0]
    return results


def add_modulations(weights: Params, modulation: dict[str, jax.Array]) -> Params:
    """Return the layer's weights with the sums of its tables and the step's embeddings, float32 [M, rows, C]."""
    tables = {
        "video": ("scale_shift_table", slice(None)),
        "audio": ("audio_scale_shift_table", slice(None)),
        "cross_video": ("video_a2v_cross_attn_scale_shift_table", slice(4)),
        "cross_audio": ("audio_a2v_cross_attn_scale_shift_table", slice(4)),
        "cross_video_gate": ("video_a2v_cross_attn_scale_shift_table", slice(4, None)),
        "cross_audio_gate": ("audio_a2v_cross_attn_scale_shift_table", slice(4, None)),
        "text": ("prompt_scale_shift_table", slice(None)),
        "audio_text": ("audio_prompt_scale_shift_table", slice(None)),
    }
    sums = {
        name: weights[table][rows].astype(jnp.float32) + modulation[name]
        for name, (table, rows) in tables.items()
        if name in modulation
    }
    return weights | {f"modulation.{name}": value for name, value in sums.items()}


def project_texts(module: Any, texts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the texts with the streams' channels: LTX-2.0 projects them here, LTX-2.3 did so in the connectors."""
    if not module.config.use_prompt_embeddings:
        return texts
    return module.caption_projection(texts[0]), module.audio_caption_projection(texts[1])
