"""Counts the operations of a MiniMax-H3 model's stages on diffusers' and transformers' own modules."""

import collections
from collections.abc import Sequence
from typing import Any

import torch

from wan_tpu.families.minimax_h3 import audio, components, reference_inputs, references, text, vae
from wan_tpu.families.minimax_h3.clips import CLIP_FRAMES, CLIP_LATENTS
from wan_tpu.families.minimax_h3.config import STRIDE
from wan_tpu.families.minimax_h3.spec import MiniMaxH3Spec
from wan_tpu.families.minimax_h3.vision import pictures, presentation
from wan_tpu.families.shared.flop_count import count
from wan_tpu.ops.tiles import Tiles
from wan_tpu.request import IMAGES, ResolvedRequest


class MiniMaxH3Flops:
    """Floating-point operations (a multiply-add is two) of each stage of one model."""

    def __init__(self, spec: MiniMaxH3Spec, text_rows: int) -> None:
        """Count a model, with texts of that many rows."""
        self._spec, self._config, self._text_rows = spec, spec.config, text_rows

    def encoder(self, request: ResolvedRequest, *, prompts: int) -> int:
        """Count the encoding of prompts, or of the prompt with the request's images or references."""
        if request.references is not None:
            return self._encode_references(request)
        images = sum(getattr(request, name) is not None for name in IMAGES)
        if not images:
            return prompts * text.count_flops(self._config, self._text_rows)
        size = request.height, request.width
        keyframes = images * vae.count_encoding(self._config, *size)
        return keyframes + presentation.count_flops(self._config, *size, images, self._text_rows)

    def step(self, latent_shape: tuple[int, ...], *, branches: int, images: int = 0) -> int:
        """Count a denoising step over latents [1, C, T, H, W].

        Keyframes are rows of the video and of the text. The text's own layers, which run once a request, are counted in
        every step; they are a thousandth of it.
        """
        return self._count_step(self._rows(latent_shape, images))

    def reference_step(self, latent_shape: tuple[int, ...], measures: Sequence[references.Measure]) -> int:
        """Count a step with references, whose rows are padded."""
        video, sound, words = self._rows(latent_shape, 0)
        room = references.find_room(self._config, measures)
        return self._count_step((video + room.visible, sound + room.voices, words + room.vision))

    def _count_step(self, rows: tuple[int, int, int]) -> int:
        build = components.transformer(self._config).build
        return count(build, lambda module: self._run(module, rows))

    def _encode_references(self, request: ResolvedRequest) -> int:
        """Count the encoding of a request's references by each encoder, and of the prompt with them."""
        measures = references.measure(self._config, request)
        counts = {
            reference_inputs.IMAGE: lambda shape: vae.count_encoding(self._config, *shape[3:]),
            reference_inputs.CLIP: lambda shape: vae.count_clip(self._config, *shape[3:]),
            reference_inputs.VOICES: lambda shape: audio.count_encoding(self._config, shape[1]),
        }
        values = reference_inputs.list_shapes(self._config, request)
        shapes = collections.Counter((name, shape) for name, shape, _ in values)
        encoding = sum(times * counts[name](shape) for (name, shape), times in shapes.items())
        return encoding + presentation.count_reference_flops(self._config, measures, self._text_rows)

    def attention(self, latent_shape: tuple[int, ...], *, images: int = 0) -> int:
        """Count the two products of attention to all keys in a step, those of the text's own layers left out."""
        config = self._config.transformer
        width = config["num_attention_heads"] * config["attention_head_dim"]
        return 4 * sum(self._rows(latent_shape, images)) ** 2 * width * int(config["num_layers"])

    def gates(self, latent_shape: tuple[int, ...], *, images: int = 0) -> int:
        """Count the products with the gates of video sparse attention in a step."""
        config = self._config.transformer
        width = config["num_attention_heads"] * config["attention_head_dim"]
        return (
            2 * sum(self._rows(latent_shape, images)) * int(config["hidden_size"]) * width * int(config["num_layers"])
        )

    def share_by_tiles(
        self, grid: tuple[int, int, int], latent_shape: tuple[int, ...], sparsity: float, *, images: int = 0
    ) -> float:
        """Return the share of attention's products that video sparse attention computes.

        Args:
            grid: The video's tokens in time, height and width.
            latent_shape: [1, C, T, H, W].
            sparsity: The share of the video's tiles that a tile leaves out.
            images: The number of keyframes.
        """
        tiles, rows = Tiles(grid, ()), sum(self._rows(latent_shape, images))
        video, others = tiles.video_rows, rows - tiles.video_rows
        attended = video * tiles.kept(sparsity) / tiles.video
        return (video * (attended + others) + others * rows) / rows**2

    def decoder(self, latent_shape: tuple[int, ...]) -> int:
        """Count the decoding of latents [1, C, T, H, W], and of the sound."""
        return vae.count_decoding(self._config, latent_shape) + audio.count_flops(
            self._config, self._audio_tokens(latent_shape)
        )

    def _audio_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Return the sound's latents of a video."""
        clips = (latent_shape[2] - 2) // CLIP_LATENTS
        return self._spec.audio_tokens(clips * CLIP_FRAMES + CLIP_LATENTS)

    def _rows(self, latent_shape: tuple[int, ...], images: int) -> tuple[int, int, int]:
        """Return the rows of video and keyframes, of the sound, and of the text with its images."""
        _, channels, _, height, width = latent_shape
        keyframes = images * self._spec.tokens((1, channels, 1, height, width))
        words = self._text_rows + images * pictures.vision_rows(self._config, STRIDE * height, STRIDE * width)
        return self._spec.tokens(latent_shape) + keyframes, self._audio_tokens(latent_shape), words

    def _run(self, module: Any, rows_of: tuple[int, int, int]) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="meta")

        (video, sound, words), config = rows_of, module.config
        rows = video + sound + words
        indices = torch.arange(rows, device="meta")
        module(
            hidden_states=empty(1, video, module.proj_in.in_features),
            audio_hidden_states=empty(1, sound, config.audio_in_channels),
            encoder_hidden_states=empty(1, words, config.text_dim),
            timestep=empty(2),
            timestep_indices=indices,
            token_tags=indices,
            position_ids=empty(rows, 3),
            video_indices=indices[:video],
            audio_indices=indices[video : video + sound],
            text_indices=indices[video + sound :],
        )
