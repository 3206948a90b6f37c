"""The LTX-2 family: video with sound from text, or from text and an image.

The references for every formula are ltx-core and ltx-pipelines 1.0.0, Lightricks' own programs, and, for the preset
that follows it, diffusers 0.42, pipelines/ltx2.

Shapes: T latent frames, H W latent height and width, L tokens of the video, A tokens of the sound, C channels.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.families.ltx2 import audio, components, connectors, image, positions, text, transformer, upsampler, vae
from wan_tpu.families.ltx2.config import Ltx2Config, is_23
from wan_tpu.families.ltx2.flops import Ltx2Flops
from wan_tpu.families.ltx2.guidance import combine, evaluations, guidance_of
from wan_tpu.families.ltx2.spec import REFINE, Ltx2Spec
from wan_tpu.families.model import Model, StepInputs
from wan_tpu.families.shared.causal_vae import CausalChunks
from wan_tpu.families.shared.family_spec import DENOISE
from wan_tpu.families.shared.flop_count import Flops
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.plan import AUDIO, VIDEO, Expert
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component, Loaded


class Ltx2Model(Model):
    """One LTX-2 model."""

    spec: Ltx2Spec
    config: Ltx2Config
    adapted_encoders = ("connectors",)
    latents_dtype = np.float32  # The statistics of latents are among the VAE's weights.

    @functools.cached_property
    def components(self) -> dict[str, Component]:
        """Every component, by the name of its role; the checkpoint's "vae" serves two."""
        config = self.config
        parts = {
            "text_encoder": text.text_encoder(config),
            "connectors": connectors.connectors(config),
            DENOISE: components.transformer(config),
            "vae_encoder": vae.vae_half(config, "decoder"),
            "decoder": vae.vae_half(config, "encoder"),
            "audio_decoder": audio.audio_decoder(config),
            "vocoder": audio.vocoder(config),
        }
        if config.upsampler is not None:
            parts |= {
                REFINE: parts[DENOISE],
                "upsampler": upsampler.upsampler(config),
                "statistics": vae.statistics(config),
            }
        return parts

    @property
    def same_weights(self) -> Mapping[str, str]:
        """Both stages run one transformer."""
        return {REFINE: DENOISE}

    @property
    def flops(self) -> Flops:
        """The floating-point operations of each stage."""
        return Ltx2Flops(self.spec)

    # ---- Shapes.

    @property
    def text_shape(self) -> tuple[int, int]:
        """(L, C) of the video's embeddings of a prompt."""
        return connectors.TEXT_TOKENS, self.spec.text_width("video")

    @property
    def prompt_shapes(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Embeddings of a prompt for the video and for the sound."""
        audio_text = connectors.TEXT_TOKENS, self.spec.text_width("audio")
        return {"text": (self.text_shape, False), "audio_text": (audio_text, False)}

    def image_latents_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of an image's latents, those of the first frame."""
        return (*latent_shape[:2], 1, *latent_shape[3:])

    def image_chunks(self, request: ResolvedRequest, images: int) -> list[tuple[int, int, int, int, int]]:
        """Return the shape of the image at each size at which it is encoded."""
        return [(1, 3, 1, *size) for size in self.spec.image_sizes(request)]

    # ---- The encoder stage.

    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return ids and mask of a prompt, int32 [1, 1024], and the cut if it is too long."""
        ids, mask, warnings = text.tokenize_prompt(self.tokenizers["text_encoder"], prompt)
        return {"text_encoder": (ids, mask)}, warnings

    def joined_with(self, component: str, *, images: bool = False) -> tuple[str, ...]:
        """Return the connectors. They need all of Gemma's hidden states, which therefore never leave the devices."""
        return ("connectors",)

    def encode_text(self, component: str, loaded: Sequence[Loaded], *tokens: jax.Array) -> dict[str, jax.Array]:
        """Encode ids and mask [B, 1024] as embeddings for the video and for the sound, [B, 1024, C]."""
        encoder, connector = loaded
        return text.encode_prompt(encoder, connector, *tokens)

    def prompt_arrays(
        self, tokens: Mapping[str, tuple[np.ndarray, ...]], encoded: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Return both embeddings of a prompt, by name."""
        return dict(encoded["text_encoder"])

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the image as the VAE takes it, float32 [1, 3, 1, H, W] in [-1, 1], at each size of `image_sizes`."""
        assert isinstance(request.image, Image.Image)
        compressed = image.compress(request.image)
        return [self._fit(compressed, request, *size) for size in self.spec.image_sizes(request)]

    def _fit(self, picture: Image.Image, request: ResolvedRequest, height: int, width: int) -> np.ndarray:
        if self.spec.follows_diffusers(request):
            slack = self.spec.shape_slack * height // request.height
            pixels = 2.0 * (image.fit_as_diffusers(picture, height, width, slack=slack) / 255.0) - 1.0
        else:
            pixels = image.fit_as_lightricks(picture, height, width) / 127.5 - 1.0
        return pixels.transpose(2, 0, 1)[None, :, None]

    def image_latents(self, moments: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """Return the mean, the first half of the channels, float32 [1, C, 1, H, W]."""
        return moments[:, : self.config.vae["latent_channels"]].astype(np.float32)

    def vae_encoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the functions that encode pixels as normalised moments."""
        return vae.encoder_chunks(self.config, module, mesh)

    # ---- The transformer.

    def initial_noises(self, request: ResolvedRequest, noise: np.ndarray | None, images: int) -> dict[str, np.ndarray]:
        """Return the noise of video and sound, drawn in this order.

        The video's noise is drawn even if `noise` replaces it: diffusers mixes latents that it is given with a noise
        whose weight is 0.
        """
        drawn = self._draw_first(request, torch.Generator("cpu").manual_seed(request.seed))
        return drawn if noise is None else drawn | {VIDEO: noise}

    def _draw_first(self, request: ResolvedRequest, generator: torch.Generator) -> dict[str, np.ndarray]:
        """Draw the noise of the first stage: Lightricks draws tokens, diffusers the latents before they become tokens.

        Source: ltx_core/components/noisers.py and tools.py of ltx-core 1.0.0.
        """
        shapes = self.spec.latent_shapes(request, 0)
        if not self.spec.follows_diffusers(request):
            return {VIDEO: _draw_tokens(shapes[VIDEO], generator), AUDIO: _draw(shapes[AUDIO], generator)}
        video = _draw(shapes[VIDEO], generator)
        _, count, channels = shapes[AUDIO]
        latents = self.config.audio_vae["latent_channels"]
        sound = _draw((1, latents, count, channels // latents), generator)
        return {VIDEO: video, AUDIO: sound.transpose(0, 2, 1, 3).reshape(shapes[AUDIO])}

    def renoise(self, request: ResolvedRequest, expert: Expert, *, has_image: bool) -> dict[str, np.ndarray]:
        """Return the noise of the second stage, drawn after the first one's.

        It is drawn as tokens, except for the video's in diffusers where there is an image.
        """
        generator = torch.Generator("cpu").manual_seed(request.seed)
        self._draw_first(request, generator)
        shapes = self.spec.latent_shapes(request, expert.stop)
        draw = _draw if has_image and self.spec.follows_diffusers(request) else _draw_tokens
        return {VIDEO: draw(shapes[VIDEO], generator), AUDIO: _draw(shapes[AUDIO], generator)}

    def enlarge(self, loaded: Sequence[Loaded], mesh: Mesh, latents: jax.Array) -> jax.Array:
        """Double the width and height of the video's latents."""
        network, statistics = loaded
        mean, deviation = (statistics.params[f"latents_{name}"] for name in ("mean", "std"))
        deviation = deviation / self.config.vae["scaling_factor"]
        return upsampler.upsample(network.module, network.params, mesh, latents, mean, deviation)

    def constants(
        self, request: ResolvedRequest, latent_shape: tuple[int, ...], text: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the rotary tables of the request's tokens, whose positions are seconds and pixels.

        With them come the parts of a step's noise that an image's tokens count with, float32 [2]: when guidance is
        rescaled, and in the attention between video and sound.
        """
        _, count, _ = self.spec.audio_shape(request)
        frames, height, width = latent_shape[2:]
        tables = positions.make_tables(self.config.transformer, (frames, height, width), count, request.fps)
        follows_diffusers = self.spec.follows_diffusers(request)
        in_guidance = guidance_of(self.config, follows_diffusers=follows_diffusers).image_noise
        # ltx-core 1.0.0 modulates this attention by the sound's timestep (ltx_core/model/transformer/
        # transformer_args.py); diffusers does so for LTX-2.3 only.
        in_attention = 1.0 if is_23(self.config) or not follows_diffusers else 0.0
        rules = {_IMAGE_NOISE: np.array([in_guidance, in_attention], np.float32)}
        return rules | {f"{_ROPE}{name}": table for name, table in tables.items()}

    def text_keys(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        text: Mapping[str, jax.Array],
        image: jax.Array | None,
    ) -> dict[str, jax.Array]:
        """Return the prompt's arrays unchanged; all that the transformer computes from them depends on the step."""
        return dict(text)

    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the guided velocities, float32, of the video [1, C, T, H, W] and of the sound [1, A, C]."""
        assert inputs.audio is not None
        latents, (sound, time), picture = inputs.latents, inputs.audio, inputs.image_latents
        keys, dtype = inputs.keys, inputs.keys["text"].dtype
        rope = {name.removeprefix(_ROPE): keys[name] for name in keys if name.startswith(_ROPE)}
        sigma, times = time / 1000, time[None]
        cross_times, noise, of_image = times, sigma, jnp.zeros_like(latents[:, :, :1])
        if picture is not None:
            # Tokens of the first latent frame have timestep 0: the image has no noise. Its velocity leads from what the
            # latents have there to the image, which the model sees from the first step on.
            if picture.shape[3:] == latents.shape[3:]:
                of_image = (latents[:, :, :1] - picture) / sigma
                latents = latents.at[:, :, :1].set(picture)
            in_guidance, in_attention = keys[_IMAGE_NOISE]
            times = jnp.stack([jnp.zeros_like(time), time])
            if not is_23(self.config):
                cross_times = jnp.stack([in_attention * time, time])
            is_image = jnp.arange(math.prod(latents.shape[2:])) < math.prod(latents.shape[3:])
            noise = jnp.where(is_image, in_guidance * sigma, sigma)[:, None]
        videos, sounds = transformer.predict(
            module,
            params,
            mesh,
            latents.astype(dtype),
            sound[0].astype(dtype),
            transformer.Conditions(times, cross_times, time[None], keys["text"], keys["audio_text"], rope),
            evaluations(self.config, inputs.guidance.shape[-1]),
        )
        tokens = latents[0].reshape(latents.shape[1], -1).T
        velocity = combine(videos, tokens, sigma, inputs.guidance[0], noise).T.reshape(latents.shape)
        if picture is not None:
            velocity = velocity.at[:, :, :1].set(of_image)
        return {VIDEO: velocity, AUDIO: combine(sounds, sound[0], sigma, inputs.guidance[1], sigma)[None]}

    # ---- The decoder stage.

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the function that decodes all latents at once."""
        return vae.decoder_chunks(self.config, module, mesh)

    def decode_sound(self, component: str, module: torch.nn.Module, params: Params, value: jax.Array) -> jax.Array:
        """Decode latents [1, A, C] as a mel spectrogram, and that as samples [2, samples]."""
        decode = {"audio_decoder": audio.decode_mel, "vocoder": audio.vocode}[component]
        return decode(module, params, value)


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> np.ndarray:
    return torch.randn(shape, generator=generator).numpy()


def _draw_tokens(shape: tuple[int, ...], generator: torch.Generator) -> np.ndarray:
    """Draw noise [1, C, T, H, W] token by token."""
    _, channels, *grid = shape
    return np.ascontiguousarray(_draw((math.prod(grid), channels), generator).T.reshape(shape))


_ROPE, _IMAGE_NOISE = "rope.", "image noise"
