"""The LTX-2 family: video with sound from text, or from text and an image.

The references for every formula are ltx-core and ltx-pipelines 1.0.0, Lightricks' own programs (for LTX-2.5 those of
github.com/Lightricks/LTX-2 at 400fd310), and, for the preset that follows it, diffusers 0.42, pipelines/ltx2.

Shapes: T latent frames, H W latent height and width, L tokens of the video, A tokens of the sound, C channels.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.families.ltx2 import (
    audio,
    components,
    connectors,
    diffusion_decoder,
    duration,
    gemma,
    image,
    known,
    positions,
    text,
    transformer,
    upsampler,
    vae,
)
from wan_tpu.families.ltx2.config import Ltx2Config, is_25
from wan_tpu.families.ltx2.flops import Ltx2Flops
from wan_tpu.families.ltx2.guidance import combine, evaluations, guidance_of
from wan_tpu.families.ltx2.spec import AUDIO_STRIDE, OVERLAP, REFINE, VOICE_ENCODER, Ltx2Spec
from wan_tpu.families.ltx2.streams.modulation import Times
from wan_tpu.families.model import Model, StepInputs
from wan_tpu.families.shared.causal_vae import CausalChunks, Chunks
from wan_tpu.families.shared.family_spec import DENOISE
from wan_tpu.families.shared.flop_count import Flops
from wan_tpu.families.shared.normal import draw_normal
from wan_tpu.families.shared.resampling import read_soundtrack
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.plan import AUDIO, SECONDS, VIDEO, Expert, PromptText
from wan_tpu.reference import CONTINUED, find_soundtrack, find_tail
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.tail import Tail


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
            "text_encoder": gemma.text_encoder(config.text_encoder),
            "connectors": connectors.connectors(config),
            DENOISE: components.transformer(config),
            "vae_encoder": vae.vae_half(config, "decoder"),
            "decoder": self._decoder,
            "audio_decoder": audio.audio_half(config, "encoder"),
            "vocoder": audio.vocoder(config),
            VOICE_ENCODER: audio.audio_half(config, "decoder"),
        }
        if config.duration_head is not None:
            widths = {stream: self.spec.text_width(stream) for stream in connectors.STREAMS}
            parts["duration_head"] = duration.duration_head(config.duration_head, widths)
        if config.upsampler is not None:
            parts |= {
                REFINE: parts[DENOISE],
                "upsampler": upsampler.upsampler(config),
                "statistics": vae.statistics(config),
            }
        return parts

    @property
    def _decoder(self) -> Component:
        """The VAE's decoder, or the one that takes its place."""
        if self.config.diffusion_decoder is None:
            return vae.vae_half(self.config, "encoder")
        return diffusion_decoder.decoder(self.config.diffusion_decoder)

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

    def condition_shapes(self, request: ResolvedRequest, expert: Expert) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the rows of what is known, with an image and without, or that of an image."""
        if request.references is None:
            return super().condition_shapes(request, expert)
        rooms = (self.spec.find_room(request, image=images > 0) for images in self.spec.images_of(request))
        return tuple((1, room.rows, known.count_channels(self.config)) for room in rooms if room is not None)

    def reference_shapes(self, request: ResolvedRequest, images: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Return the image, or the frames of a file's end, in each size, and the spectrograms of known sounds."""
        room, settings = self.spec.find_room(request), self.config.audio_vae
        assert room is not None
        tail, count = find_tail(request.references), images
        if tail is not None and tail.kind == CONTINUED:
            count = OVERLAP.frames
        sizes = known.list_sizes(room) if count else []
        frames = [(_PICTURES, (1, 3, count, *size), "float32") for size in sizes]
        counts = (AUDIO_STRIDE * (count - 1) + 1 for count in room.audio if count)
        return [*frames, *((VOICE_ENCODER, (1, 2, count, settings["mel_bins"]), "float32") for count in counts)]

    def image_chunks(self, request: ResolvedRequest, images: int) -> list[tuple[int, int, int, int, int]]:
        """Return the shape of the image at each size at which it is encoded."""
        return [(1, 3, 1, *size) for size in self.spec.image_sizes(request)]

    # ---- The encoder stage.

    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return ids and mask of a prompt, int32 [1, 1024], and the cut if it is too long."""
        return self.tokenize_text(PromptText(prompt))

    def tokenize_text(self, prompt: PromptText) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return the same for a request's prompt.

        Gemma 4's tokenizer puts no <bos> before it, and Lightricks' does: ltx_core/text_encoders/gemma/tokenizer.py of
        github.com/Lightricks/LTX-2 at 400fd310.
        """
        begins = is_25(self.config) and not prompt.by_diffusers
        ids, mask, cuts = text.tokenize_prompt(self.tokenizers["text_encoder"], prompt.text, begins=begins)
        return {"text_encoder": (ids, mask)}, cuts

    def joined_with(self, component: str, *, images: bool = False) -> tuple[str, ...]:
        """Return the connectors, and the head that reads from their text how long the video should be.

        Gemma's hidden states, all of which the connectors need, therefore never leave the devices.
        """
        return ("connectors", "duration_head") if self.spec.chooses_length else ("connectors",)

    def encode_text(self, component: str, loaded: Sequence[Loaded], *tokens: jax.Array) -> dict[str, jax.Array]:
        """Encode ids and mask [B, 1024] as embeddings for the video and for the sound, [B, 1024, C].

        With a duration head, `SECONDS` [B] are there, too.
        """
        encoder, connector, *heads = loaded
        encoded = text.encode_prompt(encoder, connector, *tokens)
        for head in heads:
            encoded[SECONDS] = duration.predict_seconds(head, encoded)
        return encoded

    def prompt_arrays(
        self, tokens: Mapping[str, tuple[np.ndarray, ...]], encoded: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Return both embeddings of a prompt by name, and perhaps `SECONDS`."""
        return dict(encoded["text_encoder"])

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the image as the VAE takes it, float32 [1, 3, 1, H, W] in [-1, 1], at each size of `image_sizes`."""
        assert isinstance(request.image, Image.Image)
        compressed = image.compress(request.image, image.CRF_25 if is_25(self.config) else image.CRF)
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

    def read_references(
        self, request: ResolvedRequest
    ) -> tuple[list[tuple[str, np.ndarray]], dict[str, tuple[Any, ...]], list[Cut]]:
        """Return the image, or the frames of a file's end, in each size, and the spectrograms of known sounds."""
        room = self.spec.find_room(request)
        assert room is not None
        frames = known.read_frames(request, room) if request.image is None else self.video_condition(request)
        sounds = [(VOICE_ENCODER, mel) for mel in known.read_sounds(self.config, request, room)]
        return [*((_PICTURES, part) for part in frames), *sounds], {}, []

    def encode_reference(
        self, component: str, module: torch.nn.Module, params: Params, mesh: Mesh, value: jax.Array
    ) -> jax.Array:
        """Encode frames as latents [1, C, T, H, W], or a spectrogram as latents [A, C]; float32."""
        if component == VOICE_ENCODER:
            return audio.encode_mel(module, params, value)
        moments = vae.encode_frames(vae.encoder_chunks(self.config, module, mesh), params, value)
        return moments[:, : self.config.vae["latent_channels"]]

    def reference_latents(self, encoded: Sequence[np.ndarray], request: ResolvedRequest) -> np.ndarray:
        """Return the rows of all that is known, float32 [1, R, C]."""
        room = self.spec.find_room(request, image=request.image is not None)
        assert room is not None
        return known.to_rows(self.config, request, room, encoded)

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

    def _step_generator(self, request: ResolvedRequest, own_noise: bool) -> torch.Generator:
        """Return the generator of the steps' fresh noise, which is another one than that of the initial noise.

        Source: ltx_pipelines/distilled.py of github.com/Lightricks/LTX-2 at 400fd310.
        """
        return torch.Generator("cpu").manual_seed(request.seed + _STEP_SEEDS)

    def _draw_step(self, request: ResolvedRequest, generator: torch.Generator) -> dict[str, np.ndarray]:
        """Draw a step's noise as tokens: the video's of the first stage, then the sound's."""
        shapes = self.spec.latent_shapes(request, 0)
        return {VIDEO: _draw_tokens(shapes[VIDEO], generator), AUDIO: _draw(shapes[AUDIO], generator)}

    def renoise(self, request: ResolvedRequest, expert: Expert, *, has_image: bool) -> dict[str, np.ndarray]:
        """Return the noise of the second stage, drawn after the first one's.

        It is drawn as tokens, except for the video's in diffusers where there is an image.
        """
        generator = torch.Generator("cpu").manual_seed(request.seed)
        self._draw_first(request, generator)
        return self._draw_again(request, expert, generator, has_image=has_image)

    def _draw_again(
        self, request: ResolvedRequest, expert: Expert, generator: torch.Generator, *, has_image: bool = False
    ) -> dict[str, np.ndarray]:
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

        With them come the part of a step's noise that an image's tokens count with when guidance is rescaled, float32
        [], whether the first latent frame is marked, and whether tokens attend to the other stream by their own
        timesteps.
        """
        _, count, _ = self.spec.audio_shape(request)
        frames, height, width = latent_shape[2:]
        tables = positions.make_tables(self.config.transformer, (frames, height, width), count, request.fps)
        follows_diffusers = self.spec.follows_diffusers(request)
        in_guidance = guidance_of(self.config, follows_diffusers=follows_diffusers).image_noise
        rules = {_IMAGE_NOISE: np.array(in_guidance, np.float32)}
        if self.config.transformer["use_keyframes_abs_pos_embedding"]:
            # Lightricks always marks the first latent frame: ltx_core/tools.py of github.com/Lightricks/LTX-2 at
            # 400fd310. diffusers' pipelines for text and images don't.
            rules[_MARKER] = np.array(0.0 if follows_diffusers else 1.0, np.float32)
        if is_25(self.config):
            rules[_OWN_TIMES] = np.array(0.0 if follows_diffusers else 1.0, np.float32)
        return rules | {f"{_ROPE}{name}": table for name, table in tables.items()}

    def variant(self, request: ResolvedRequest) -> dict[str, Any]:
        """Return the rows of what is known."""
        room = self.spec.find_room(request)
        return {} if room is None else {_ROOM: known.StaticRoom(room)}

    def text_keys(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        text: Mapping[str, jax.Array],
        image: jax.Array | None,
    ) -> dict[str, jax.Array]:
        """Return the prompt's arrays unchanged; all that the transformer computes from them depends on the step."""
        return {name: value for name, value in text.items() if name != _ROOM}

    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the guided velocities, float32, of the video [1, C, T, H, W] and of the sound [1, A, C]."""
        assert inputs.audio is not None
        latents, (sound, time), picture = inputs.latents, inputs.audio, inputs.image_latents
        keys, texts = inputs.keys, (inputs.keys["text"], inputs.keys["audio_text"])
        dtype = texts[0].dtype
        rope = {name.removeprefix(_ROPE): keys[name] for name in keys if name.startswith(_ROPE)}
        sigma, frames, sounds = time / 1000, (0, 0), (0, 0)
        # What is known has timestep 0: it has no noise. Its velocity leads from what the latents have there to what is
        # known, which the model sees from the first step on.
        seen, heard = latents, sound
        if _ROOM in keys:
            room = known.fit_room(cast(known.StaticRoom, keys[_ROOM]).room, picture)
            frames, sounds = room.frames, room.audio
            seen, heard = known.fill_video(room, picture, latents), known.fill_audio(room, picture, sound)
        elif picture is not None:
            frames = 1, 0
            if picture.shape[3:] == latents.shape[3:]:
                seen = latents.at[:, :, :1].set(picture)
        of_video, of_audio = known.Ends(*frames, latents.shape[2]), known.Ends(*sounds, sound.shape[1])
        in_guidance = keys[_IMAGE_NOISE]
        times, audio_times = of_video.choose_times(time), of_audio.choose_times(time)
        # The sound's text is that of a sound without noise if all of it is given.
        audio_time = audio_times if len(audio_times) == 1 else time[None]
        # Each stream attends to the other one by that one's timestep: ltx_core/model/transformer/transformer_args.py of
        # ltx-core 1.0.0, and `use_cross_timestep` of diffusers. In 1.2.0, only what it takes has that timestep.
        cross_video, cross_audio = gates = audio_time, time[None]
        if (by_own := keys.get(_OWN_TIMES)) is not None:
            cross_video, cross_audio = (
                jnp.where(by_own > 0, own, other) for own, other in zip((times, audio_times), gates, strict=True)
            )
        videos, audios = transformer.predict(
            module,
            params,
            mesh,
            seen.astype(dtype),
            heard[0].astype(dtype),
            transformer.Conditions(
                Times(times, audio_times, cross_video, cross_audio, *gates, time[None], audio_time),
                keys["text"],
                keys["audio_text"],
                rope,
                keys.get(_MARKER),
            ),
            transformer.LatentCounts(of_video.counts, of_audio.counts),
            # The second stage has no negative prompt even where the first one has guidance.
            evaluations(self.config, inputs.guidance.shape[-1] if len(texts[0]) > 1 else 1),
        )

        def guide(velocities: jax.Array, tokens: jax.Array, guidance: jax.Array, is_known: np.ndarray) -> jax.Array:
            noise = jnp.where(is_known, in_guidance * sigma, sigma)[:, None] if is_known.any() else sigma
            return combine(velocities, tokens, sigma, guidance, noise)

        tokens, masks = seen[0].reshape(seen.shape[1], -1).T, (of_video.mask, of_audio.mask)
        are_known = np.repeat(masks[0], math.prod(latents.shape[3:]))
        velocity = guide(videos, tokens, inputs.guidance[0], are_known).T.reshape(latents.shape)
        audio_velocity = guide(audios, heard[0], inputs.guidance[1], masks[1])[None]
        return {
            VIDEO: jnp.where(masks[0][:, None, None], (latents - seen) / sigma, velocity),
            AUDIO: jnp.where(masks[1][:, None], (sound - heard) / sigma, audio_velocity),
        }

    def finish(self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest) -> np.ndarray:
        """Replace latents that are known by what they are, to the last bit."""
        if (room := self.spec.find_room(request)) is None:
            return latents
        filled: np.ndarray = known.fill_video(known.fit_room(room, image_latents), image_latents, latents)
        return filled

    def finish_sound(
        self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest
    ) -> np.ndarray:
        """Do the same with the sound's."""
        if (room := self.spec.find_room(request)) is None:
            return latents
        filled: np.ndarray = known.fill_audio(known.fit_room(room, image_latents), image_latents, latents)
        return filled

    # ---- The decoder stage.

    def given_sound(self, request: ResolvedRequest) -> np.ndarray | None:
        """Return the soundtrack, at the rate of the model and as long as the video."""
        track = find_soundtrack(request.references)
        if track is None or not isinstance(track.source, Tail):
            return None
        rate = self.spec.audio_rate
        return read_soundtrack(track.source, rate, round(request.frames / request.fps * rate))

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> Chunks:
        """Return the function that decodes all latents at once."""
        if self.config.diffusion_decoder is None:
            return vae.decoder_chunks(self.config, module, mesh)
        return diffusion_decoder.DiffusionChunks(self.config.diffusion_decoder, module, mesh)

    def draw_decoder_noise(self, request: ResolvedRequest, dtype: torch.dtype) -> torch.Tensor:
        """Draw the diffusion decoder's noise, after that of all stages' latents."""
        generator = torch.Generator("cpu").manual_seed(request.seed)
        self._draw_first(request, generator)
        for expert in self.spec.experts(request)[1:]:
            self._draw_again(request, expert, generator)
        shape = self.spec.decoder_noise_shape(request)
        assert shape is not None
        return draw_normal(shape, generator, dtype)

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


_ROPE, _IMAGE_NOISE, _MARKER, _ROOM = "rope.", "image noise", "first frame's marker", "known"
_OWN_TIMES = "own timesteps"
_PICTURES = "vae_encoder"
_STEP_SEEDS = 10_000  # The seed of the steps' noise is this much higher than the request's.
