"""An LTX-2 transformer as a program for slices: diffusers' parameters and arithmetic, split over the mesh.

Video and sound are two streams with separate weights. Each attends to itself, to its own embeddings of the text and to
the other stream. The video's tokens are spread over the devices, and its weights are gathered layer by layer while
earlier ones are in use. The sound has 126 tokens where the video has 32,640: every device of a branch has all of them,
but only its own heads and hidden units of their weights, whose results are summed over 'tp'.

Guidance takes up to four evaluations of the same latents (`Evaluation`). Their tokens go through each layer together,
which so reads its weights once; on no mesh are they split over devices.

Shapes: L tokens of the video, t those of one device, A tokens of the sound, S tokens of a text, X texts, E evaluations,
N heads, D head width, C channels of the video.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from wan_tpu.families.ltx2.guidance import Evaluation
from wan_tpu.families.ltx2.sharding import IN_PLACE, RULES, TEXT
from wan_tpu.families.ltx2.streams.modulation import Times, add_modulations, embed_times, project_texts
from wan_tpu.families.ltx2.streams.sound import SoundStream
from wan_tpu.families.ltx2.streams.video import PREFETCHED, VideoStream
from wan_tpu.families.shared.layers import linear, scan_layers
from wan_tpu.families.shared.tokens import pad_rows
from wan_tpu.ops.dispatch import ops_for
from wan_tpu.runtime.bridge import Params, call, collect_linear, to_jax
from wan_tpu.runtime.mesh import TokenLayout, run_on_devices, split_layers, token_layout

_EPS = 1e-6  # Epsilon of the norm before the output: a constant of diffusers' module.


class LatentCounts(NamedTuple):
    """How many latents have each timestep, in order: all of them one, unless some are known, and so have no noise.

    Attributes:
        frames: Latent frames of the video.
        audio: Latents of the sound.
    """

    frames: tuple[int, ...]
    audio: tuple[int, ...]


class Conditions(NamedTuple):
    """The inputs, other than the latents, that a step's evaluations share.

    Attributes:
        times: The timesteps of the `LatentCounts`.
        encoder_hidden_states: [X, S, channels] of the video's embeddings of the texts.
        audio_encoder_hidden_states: The sound's.
        rotary_emb: From `positions.make_tables`.
        marker: float32 scalar, how much of the learned marker the tokens of the first latent frame get; None for
            models without one.
    """

    times: Times
    encoder_hidden_states: jax.Array
    audio_encoder_hidden_states: jax.Array
    rotary_emb: dict[str, jax.Array]
    marker: jax.Array | None = None


def predict(
    module: torch.nn.Module,
    params: Params,
    mesh: Mesh,
    video: jax.Array,
    audio: jax.Array,
    conditions: Conditions,
    counts: LatentCounts,
    evaluations: Sequence[Evaluation],
) -> tuple[jax.Array, jax.Array]:
    """Return each evaluation's velocity of video and sound as tokens, float32 [E, L, channels] and [E, A, channels].

    Args:
        module: The transformer.
        params: Its weights.
        mesh: The devices.
        video: Latents [1, channels, T, H, W], in the dtype to compute in.
        audio: Latents as tokens [A, channels].
        conditions: The inputs that all evaluations share.
        counts: How many latents have which timestep.
        evaluations: The evaluations.
    """
    grid = video.shape[2:]

    def method(module: Any, tokens: torch.Tensor, sound: torch.Tensor, texts: Any) -> tuple[jax.Array, jax.Array]:
        embedded = embed_times(module, conditions.times, tokens.dtype)
        text, audio_text = (to_jax(value) for value in project_texts(module, texts))
        count, frame = math.prod(grid), math.prod(grid[1:])
        layout = token_layout(mesh, 1, count, module.config.num_attention_heads)
        step = _Step(module, mesh, layout, grid, counts, evaluations)
        projected = to_jax(module.proj_in(tokens))
        if conditions.marker is not None:
            # The first latent frame is the only one that stands for a single frame of the video.
            marker = conditions.marker.astype(projected.dtype) * to_jax(module.keyframes_abs_pos_embedding)
            projected = projected.at[:frame].add(marker)
        return step.run(
            _Inputs(
                video=pad_rows(projected, layout.padded),
                audio=to_jax(module.audio_proj_in(sound)),
                encoder_hidden_states=text,
                audio_encoder_hidden_states=audio_text,
                rotary_emb=conditions.rotary_emb,
                modulation=embedded,
                blocks=to_jax(dict(module.transformer_blocks.template.named_parameters())),
                other_weights=collect_linear(proj_out=module.proj_out, audio_proj_out=module.audio_proj_out),
            )
        )

    tokens = video[0].reshape(video.shape[1], -1).T
    return call(
        module,
        params,
        method,
        tokens,
        audio,
        (conditions.encoder_hidden_states, conditions.audio_encoder_hidden_states),
    )


class _Inputs(NamedTuple):
    """The inputs of one step's blocks; `_Step.run` has their shardings.

    Attributes:
        video: [L, C].
        audio: [A, channels].
        encoder_hidden_states, audio_encoder_hidden_states, rotary_emb: As in `Conditions`, projected to the streams'
            channels.
        modulation: From `modulation.embed_times`, float32.
        blocks: The stacked weights of the layers.
        other_weights: The weights behind the layers.
    """

    video: jax.Array
    audio: jax.Array
    encoder_hidden_states: jax.Array
    audio_encoder_hidden_states: jax.Array
    rotary_emb: dict[str, jax.Array]
    modulation: dict[str, jax.Array]
    blocks: Params
    other_weights: Params


class _Step:
    """One step's blocks inside a `jax.shard_map`."""

    def __init__(
        self,
        module: Any,
        mesh: Mesh,
        layout: TokenLayout,
        grid: tuple[int, ...],
        counts: LatentCounts,
        evaluations: Sequence[Evaluation],
    ) -> None:
        self._config, self._mesh, self._layout, self._grid = module.config, mesh, layout, grid
        self._counts, self._evaluations, self._platform = counts, evaluations, mesh.devices.flat[0].platform

    def run(self, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
        """Return [E, L, channels] and [E, A, channels], float32, without padding."""
        self._split = split_layers(self._mesh, RULES, "transformer_blocks", inputs.blocks)
        axes = self._layout.token_axes
        video, audio = run_on_devices(
            self._run_on_device, self._mesh, inputs, (P(None, axes), P()), video=P(axes), blocks=self._split
        )
        return video[:, : math.prod(self._grid)], audio

    def _run_on_device(self, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
        modulation = inputs.modulation
        video = VideoStream(
            self._config,
            self._mesh,
            self._layout,
            self._grid,
            self._split,
            rotary_emb=inputs.rotary_emb,
            segments=[count * math.prod(self._grid[1:]) for count in self._counts.frames],
            count=len(inputs.video),
            evaluations=self._evaluations,
        )
        of_step = self._config, self._mesh, self._layout, math.prod(self._grid), self._platform
        sound = SoundStream(*of_step, self._evaluations, self._counts.audio)
        sound = sound.on_device(inputs.rotary_emb, video.start)

        def layer(hidden_states: Any, weights: Params, index: jax.Array) -> Any:
            weights = add_modulations(weights, modulation)
            keys = [video.text_keys(weights, text) for text in inputs.encoder_hidden_states]
            audio_keys = [sound.text_keys(weights, text) for text in inputs.audio_encoder_hidden_states]
            video_states, audio_states = hidden_states
            video_states, weights = video.attend_to_itself(video_states, weights, index)
            audio_states = sound.attend_to_itself(audio_states, weights, index)
            video_states = video.attend_to_text(video_states, weights, keys)
            audio_states = sound.attend_to_text(audio_states, weights, audio_keys)
            video_states, audio_states = video.attend_to_sound(video_states, audio_states, weights, sound)
            return video.feed_forward(video_states, weights), sound.feed_forward(audio_states, weights)

        hidden_states = scan_layers(
            layer,
            tuple(jnp.tile(x, (len(self._evaluations), 1)) for x in (inputs.video, inputs.audio)),
            inputs.blocks,
            # For the text's keys and values, columns are gathered instead of the matrices.
            {name: P() if re.fullmatch(rf"{TEXT}\.weight", name) else spec for name, spec in self._split.items()},
            depth=len(inputs.blocks["scale_shift_table"]),
            prefetched=PREFETCHED,
            platform=self._platform,
            linear_only=[name for name in inputs.blocks if re.fullmatch(IN_PLACE, name)],
        )
        ops = ops_for(self._platform)

        def head(states: jax.Array, name: str, stream: VideoStream | SoundStream) -> jax.Array:
            shift, scale = (modulation[f"{name}head"][:, i] for i in range(2))
            (scale, first_rows), (shift, _) = map(stream.find_segments, (scale, shift))
            normed = ops.layer_norm(states, 1 + scale, shift, eps=_EPS, first_rows=first_rows)
            velocities = linear(ops, inputs.other_weights, f"{name}proj_out", normed).astype(jnp.float32)
            return velocities.reshape(len(self._evaluations), -1, velocities.shape[1])

        return head(hidden_states[0], "", video), head(hidden_states[1], "audio_", sound)
