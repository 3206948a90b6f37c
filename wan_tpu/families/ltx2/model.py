"""The LTX-2 family: video with sound from text, or from text and an image.

The reference for every formula is diffusers 0.42, pipelines/ltx2.

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
from diffusers.pipelines.ltx2.utils import DEFAULT_IMAGE_CRF, apply_image_conditioning_crf
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.families.ltx2 import audio, components, connectors, positions, text, transformer, upsampler, vae
from wan_tpu.families.ltx2.config import Ltx2Config
from wan_tpu.families.ltx2.flops import Ltx2Flops
from wan_tpu.families.ltx2.guidance import combine, evaluations
from wan_tpu.families.ltx2.spec import REFINE, STRIDE, Ltx2Spec
from wan_tpu.families.model import Model, StepInputs
from wan_tpu.families.shared.causal_vae import CausalChunks
from wan_tpu.families.shared.family_spec import DENOISE
from wan_tpu.families.shared.flop_count import Flops
from wan_tpu.media.image import fit_image
from wan_tpu.plan import AUDIO, VIDEO, Expert
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component, Loaded

_LONGEST_SIDE = 16384  # Pixels of a picture that x264 compresses.


class Ltx2Model(Model):
    """One LTX-2 model."""

    spec: Ltx2Spec
    config: Ltx2Config
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
        """Return the shape of the image at the size of the first stage."""
        return [(1, 3, 1, *self._image_size(request))]

    # ---- The encoder stage.

    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[str]]:
        """Return ids and mask of a prompt, int32 [1, 1024], and a warning if it was cut."""
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
        """Return the image as the VAE takes it, float32 [1, 3, 1, H, W] in [-1, 1], at the size of the first stage.

        It is first compressed with H.264, because the model was trained on compressed frames.
        """
        assert isinstance(request.image, Image.Image)
        # H.264 has pairs of rows and columns, and not any number of them.
        scale = min(1.0, _LONGEST_SIDE / max(request.image.size))
        width, height = (max(2, round(side * scale)) for side in request.image.size)
        image = request.image.resize((width, height))
        compressed = Image.fromarray(apply_image_conditioning_crf(np.array(image), DEFAULT_IMAGE_CRF))
        height, width = self._image_size(request)
        slack = self.spec.shape_slack * height // request.height
        frame = fit_image(compressed, height, width, slack=slack, resample=Image.Resampling.BILINEAR)
        pixels = 2.0 * (np.asarray(frame, np.float32) / 255.0) - 1.0
        return [pixels.transpose(2, 0, 1)[None, :, None]]

    def _image_size(self, request: ResolvedRequest) -> tuple[int, int]:
        *_, height, width = self.spec.latent_shapes(request, 0)[VIDEO]
        return height * STRIDE, width * STRIDE

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
        generator = torch.Generator("cpu").manual_seed(request.seed)
        video = torch.randn(self.spec.latent_shapes(request, 0)[VIDEO], generator=generator).numpy()
        sound = self._draw_sound(request, generator).transpose(1, 2).flatten(2).numpy()
        return {VIDEO: video if noise is None else noise, AUDIO: sound}

    def _draw_sound(self, request: ResolvedRequest, generator: torch.Generator) -> torch.Tensor:
        """Draw noise [1, channels, A, bins] for the sound."""
        _, count, channels = self.spec.audio_shape(request)
        latents = self.config.audio_vae["latent_channels"]
        return torch.randn((1, latents, count, channels // latents), generator=generator)

    def renoise(self, request: ResolvedRequest, expert: Expert, *, has_image: bool) -> dict[str, np.ndarray]:
        """Return the noise of the second stage, drawn after the first one's.

        diffusers draws the sound's as tokens, and the video's as well where there is no image.
        """
        generator = torch.Generator("cpu").manual_seed(request.seed)
        torch.randn(self.spec.latent_shapes(request, 0)[VIDEO], generator=generator)
        self._draw_sound(request, generator)
        shapes = self.spec.latent_shapes(request, expert.stop)
        _, channels, *grid = shapes[VIDEO]
        if has_image:
            video = torch.randn(shapes[VIDEO], generator=generator)
        else:
            tokens = torch.randn((math.prod(grid), channels), generator=generator)
            video = tokens.T.reshape(shapes[VIDEO]).contiguous()
        return {VIDEO: video.numpy(), AUDIO: torch.randn(shapes[AUDIO], generator=generator).numpy()}

    def enlarge(self, loaded: Sequence[Loaded], mesh: Mesh, latents: jax.Array) -> jax.Array:
        """Double the width and height of the video's latents."""
        network, statistics = loaded
        mean, deviation = (statistics.params[f"latents_{name}"] for name in ("mean", "std"))
        deviation = deviation / self.config.vae["scaling_factor"]
        return upsampler.upsample(network.module, network.params, mesh, latents, mean, deviation)

    def constants(
        self, request: ResolvedRequest, latent_shape: tuple[int, ...], text: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the rotary tables of the request's tokens, whose positions are seconds and pixels."""
        _, count, _ = self.spec.audio_shape(request)
        frames, height, width = latent_shape[2:]
        tables = positions.make_tables(self.config.transformer, (frames, height, width), count, request.fps)
        return {f"{_ROPE}{name}": table for name, table in tables.items()}

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
        latents, (sound, time) = inputs.latents, inputs.audio
        times = time[None]
        if inputs.image_latents is not None:
            # The image has no noise: tokens of the first latent frame have timestep 0. In a second stage, that frame is
            # the image as enlarged with the latents.
            if inputs.image_latents.shape[3:] == latents.shape[3:]:
                latents = latents.at[:, :, :1].set(inputs.image_latents)
            times = jnp.stack([jnp.zeros_like(time), time])
        keys, dtype = inputs.keys, inputs.keys["text"].dtype
        rope = {name.removeprefix(_ROPE): keys[name] for name in keys if name.startswith(_ROPE)}
        videos, sounds = transformer.predict(
            module,
            params,
            mesh,
            latents.astype(dtype),
            sound[0].astype(dtype),
            transformer.Conditions(times, time[None], keys["text"], keys["audio_text"], rope),
            evaluations(self.config, inputs.guidance.shape[-1]),
            cross_timestep=self.config.transformer["cross_attn_mod"],
        )
        sigma = time / 1000
        tokens = latents[0].reshape(latents.shape[1], -1).T
        velocity = combine(videos, tokens, sigma, inputs.guidance[0]).T.reshape(latents.shape)
        if inputs.image_latents is not None:
            velocity = velocity.at[:, :, :1].set(0)  # The image must not change.
        return {VIDEO: velocity, AUDIO: combine(sounds, sound[0], sigma, inputs.guidance[1])[None]}

    def finish(self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest) -> np.ndarray:
        """Return the latents to decode: the image's are put back in place, unless they have been enlarged."""
        if image_latents is None or image_latents.shape[3:] != latents.shape[3:]:
            return latents
        return np.concatenate([image_latents, latents[:, :, 1:]], axis=2)

    # ---- The decoder stage.

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> CausalChunks:
        """Return the function that decodes all latents at once."""
        return vae.decoder_chunks(self.config, module, mesh)

    def decode_sound(self, component: str, module: torch.nn.Module, params: Params, value: jax.Array) -> jax.Array:
        """Decode latents [1, A, C] as a mel spectrogram, and that as samples [2, samples]."""
        decode = {"audio_decoder": audio.decode_mel, "vocoder": audio.vocode}[component]
        return decode(module, params, value)


_ROPE = "rope."
