"""The MiniMax-H3 family: video with sound from text, or from text and the first frame, the last one, or both.

The reference for every formula is diffusers 0.42, modular_pipelines/minimax_h3.

Shapes: T latent frames, H W latent height and width, R rows of the text, A latents of each channel of the sound, C
channels.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.families.minimax_h3 import audio, components, context, positions, text, transformer, vae
from wan_tpu.families.minimax_h3.config import TEXT_ROWS, MiniMaxH3Config
from wan_tpu.families.minimax_h3.flops import MiniMaxH3Flops
from wan_tpu.families.minimax_h3.spec import STRIDE, MiniMaxH3Spec
from wan_tpu.families.minimax_h3.vision import pictures, presentation, tower
from wan_tpu.families.minimax_h3.vision.pictures import fit_keyframes
from wan_tpu.families.minimax_h3.vision.presentation import Presentation
from wan_tpu.families.model import Model, StepInputs
from wan_tpu.families.shared.causal_vae import Chunks
from wan_tpu.families.shared.family_spec import DENOISE
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokens import patchify, unpatchify
from wan_tpu.ops.sparse_linear import Density
from wan_tpu.plan import AUDIO, VIDEO, Expert
from wan_tpu.request import IMAGES, ResolvedRequest
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component, Loaded

KEYFRAME_TIME = 0.999  # Keyframes have this little noise, in every step until a video has less.
ANCHORS = ("first", "last")  # Ends of the video; a prompt's array "anchors" has each keyframe's index here.


class MiniMaxH3Model(Model):
    """One MiniMax-H3 model."""

    spec: MiniMaxH3Spec
    config: MiniMaxH3Config
    text_rows = TEXT_ROWS[0]

    @functools.cached_property
    def components(self) -> dict[str, Component]:
        """Every component, by the name of its role."""
        return {
            "text_encoder": text.text_encoder(self.config),
            "vision": tower.vision(self.config),
            DENOISE: components.transformer(self.config),
            "vae_encoder": vae.vae_half(self.config, "decoder"),
            "decoder": vae.vae_half(self.config, "encoder"),
            "audio_decoder": audio.audio_decoder(self.config),
        }

    @property
    def flops(self) -> MiniMaxH3Flops:
        """The floating-point operations of each stage."""
        return MiniMaxH3Flops(self.spec, self.text_rows)

    def count_step(self, request: ResolvedRequest, expert: Expert, *, images: int) -> int:
        """Return the operations of a step; sparse attention, unlike diffusers' module, leaves out most of the keys."""
        operations, density = super().count_step(request, expert, images=images), self.spec.attention_density(request)
        if density is None:
            return operations
        return operations - int((1 - density) * self.flops.attention(self.spec.latent_shape(request), images=images))

    # ---- Shapes.

    @property
    def text_shape(self) -> tuple[int, int]:
        """(R, C) of a prompt's embeddings."""
        return self.text_rows, int(self.config.text_encoder["hidden_size"])

    @property
    def token_shapes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Ids, and the number of real ones, which come first."""
        return {"text_encoder": ((1, self.text_rows), (1, 1))}

    @property
    def prompt_shapes(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Embeddings of a prompt, the index of each of its rows, and the number of real ones."""
        rows, _ = self.text_shape
        return {"text": (self.text_shape, False), "positions": ((rows,), True), "count": ((1,), True)}

    def image_prompt_shapes(self, request: ResolvedRequest, images: int) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return the shapes of a prompt's arrays with keyframes, and which end of the video each of them is."""
        _, rows = presentation.shapes(self.config, request.height, request.width, images, self.text_rows).ids.shape
        text = {"text": ((rows, self.text_shape[1]), False), "positions": ((rows,), True)}
        return self.prompt_shapes | text | {"anchors": ((images,), True)}

    def image_token_shapes(self, request: ResolvedRequest, images: int) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
        """Return the shapes of the text encoder's inputs with keyframes."""
        size = request.height, request.width
        return {"text_encoder": presentation.shapes(self.config, *size, images, self.text_rows)}

    def image_latents_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of one keyframe's latents."""
        return (*latent_shape[:2], 1, *latent_shape[3:])

    def image_latents_shapes(self, latent_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one and of two keyframes' latents."""
        return tuple((*latent_shape[:2], count, *latent_shape[3:]) for count in (1, 2))

    def image_chunks(self, request: ResolvedRequest, images: int) -> list[tuple[int, int, int, int, int]]:
        """Return the shapes of keyframes, each of which is a chunk."""
        return [(1, 3, 1, request.height, request.width)] * images

    # ---- The encoder stage.

    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return the ids of a prompt, int32 [1, R], and their number, and the cut if it is too long."""
        ids, count, cuts = text.tokenize_prompt(self.tokenizers["text_encoder"], prompt)
        return {"text_encoder": (ids, np.array([[count]], np.int32))}, cuts

    def tokenize_with_images(self, request: ResolvedRequest) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return a prompt with its keyframes, each preceded by a label, and the cut if it is too long."""
        anchors = [ANCHORS.index(end) for end, name in zip(ANCHORS, IMAGES, strict=True) if getattr(request, name)]
        shared, keyframes = self.tokenizers["text_encoder"], self._fit_keyframes(request)
        tokens, cuts = presentation.present(self.config, shared, request.prompt, keyframes, anchors)
        return {"text_encoder": tokens}, cuts

    def joined_with(self, component: str, *, images: bool = False) -> tuple[str, ...]:
        """Return the vision tower, if there are keyframes to read."""
        return ("vision",) if images else ()

    def encode_text(self, component: str, loaded: Sequence[Loaded], *tokens: jax.Array) -> jax.Array:
        """Encode ids [1, R], with keyframes where there are any, as embeddings [1, R, C]."""
        if len(loaded) > 1:
            return presentation.encode(loaded, Presentation(*tokens))
        [encoder], (ids, _) = loaded, tokens
        return text.encode_prompt(encoder, ids)

    def prompt_arrays(
        self, tokens: Mapping[str, tuple[np.ndarray, ...]], encoded: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Return a prompt's embeddings, the index of each of its rows and the number of real ones.

        With keyframes, their rows come first, and "anchors" says which end of the video each is.
        """
        read = tokens["text_encoder"]
        if isinstance(read, Presentation):
            ends = {"count": read.count, "anchors": read.anchors}
            return {"text": encoded["text_encoder"], "positions": read.order, **ends}
        ids, count = read
        positions = np.arange(ids.shape[1], dtype=np.int32)[None]
        return {"text": encoded["text_encoder"], "positions": positions, "count": count}

    def _fit_keyframes(self, request: ResolvedRequest) -> list[Image.Image]:
        """Return the request's images in the size of the video, in order."""
        images = [image for name in IMAGES if isinstance(image := getattr(request, name), Image.Image)]
        return fit_keyframes(images, request.height, request.width, self.spec.shape_slack)

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the keyframes as the VAE takes them, each float32 [1, 3, 1, H, W], from 0 to 255."""
        frames = (np.asarray(frame, np.float32) for frame in self._fit_keyframes(request))
        return [frame.transpose(2, 0, 1)[None, :, None] for frame in frames]

    def image_latents(self, moments: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """Return the keyframes' latents, mixed with the request's first noise, float32 [1, C, 1 or 2, H, W]."""
        latents = vae.image_latents(self.config, moments)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        time = np.float32(KEYFRAME_TIME)
        noise = self._draw_keyframes(request, latents.shape[2], generator)
        return time * latents + (np.float32(1) - time) * noise

    def _draw_keyframes(self, request: ResolvedRequest, count: int, generator: torch.Generator) -> np.ndarray:
        """Draw the noise of keyframes, one after the other."""
        shape = self.image_latents_shape(self.spec.latent_shape(request))
        assert shape is not None
        noises = [torch.randn(shape, generator=generator).numpy() for _ in range(count)]
        return np.concatenate(noises, axis=2) if noises else np.zeros(0, np.float32)

    def vae_encoder(self, module: torch.nn.Module, mesh: Mesh) -> Chunks:
        """Return the function that encodes a keyframe."""
        return vae.KeyframeEncoder(module, mesh)

    # ---- The transformer.

    def initial_noises(self, request: ResolvedRequest, noise: np.ndarray | None, images: int) -> dict[str, np.ndarray]:
        """Return the noise of video and sound, drawn in this order after the keyframes'.

        None is drawn for the video if `noise` replaces it.
        """
        generator = torch.Generator("cpu").manual_seed(request.seed)
        self._draw_keyframes(request, images, generator)
        shapes = self.spec.latent_shapes(request, 0)
        video = torch.randn(shapes[VIDEO], generator=generator).numpy() if noise is None else noise
        return {VIDEO: video, AUDIO: torch.randn(shapes[AUDIO][1:], generator=generator).numpy()[None]}

    def constants(
        self, request: ResolvedRequest, latent_shape: tuple[int, ...], text: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return every row's position and where runs of rows end, both of which depend on the text's length."""
        _, _, frames, height, width = latent_shape
        _, *patch = self.config.transformer["patch_size"]
        [rows], [[count]] = text["positions"], text["count"]
        sound = self.spec.audio_tokens(request.frames)
        anchors = [ANCHORS[index] for index in text["anchors"][0]] if "anchors" in text else []
        places = positions.place_rows(
            (frames, height, width), (patch[0], patch[1]), sound, len(rows), int(count), anchors
        )
        vision = rows[: self._vision_rows(latent_shape, len(anchors))]
        keyframes = len(anchors) * self.spec.tokens((*latent_shape[:2], 1, height, width))
        return {"places": places, "ends": positions.find_ends(vision, len(anchors), int(count), keyframes, sound)}

    def variant(self, request: ResolvedRequest) -> dict[str, Any]:
        """Return how sparse attention is, where a preset makes it so."""
        density = self.spec.attention_density(request)
        return {} if density is None else {"density": Density(density)}

    def _vision_rows(self, latent_shape: tuple[int, ...], keyframes: int) -> int:
        """Return how many rows of the text keyframes take, for latents [1, C, T, H, W]."""
        height, width = (STRIDE * side for side in latent_shape[3:])
        return keyframes * pictures.vision_rows(self.config, height, width)

    def text_keys(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        text: Mapping[str, jax.Array],
        image: jax.Array | None,
    ) -> dict[str, jax.Array]:
        """Return the text's refined rows in the order of the prompt, [R, C], and the number of real ones."""
        [rows], [order], [[count]] = text["text"], text["positions"], text["count"]
        refined = context.refine_text(module, params, mesh, rows[jnp.argsort(order)], count, _read_density(text))
        return {"text": refined, "count": count}

    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the velocities, float32, of the video [1, C, T, H, W] and of the sound [1, 2 A, C]."""
        assert inputs.audio is not None
        latents, (sound, sound_time), keys = inputs.latents, inputs.audio, inputs.keys
        patch, times = self.config.transformer["patch_size"], [inputs.timestep, sound_time]
        pictures, keyframes = 0, None
        if inputs.image_latents is not None:
            pictures, keyframes = inputs.image_latents.shape[2], patchify(inputs.image_latents, patch)
            times.append(jnp.maximum(inputs.timestep, KEYFRAME_TIME))
        rows = transformer.Rows(
            text=keys["text"],
            keyframes=keyframes,
            sound=sound[0],
            video=patchify(latents, patch),
            positions=keys["places"],
            ends=keys["ends"],
            words=keys["count"],
        )
        layout = positions.Layout(
            text=len(rows.text),
            keyframes=0 if keyframes is None else len(keyframes),
            sound=sound.shape[1],
            video=len(rows.video),
            pictures=pictures,
        )
        velocity, of_sound = transformer.predict(
            module, params, mesh, rows, layout, jnp.stack(times), _read_density(keys)
        )
        return {VIDEO: unpatchify(velocity, latents.shape, patch), AUDIO: of_sound[None]}

    # ---- The decoder stage.

    def vae_latents(self, latents: np.ndarray) -> np.ndarray:
        """Undo the normalisation; float32 [1, C, T, H, W]."""
        return vae.denormalise(self.config, latents)

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> Chunks:
        """Return the functions that decode latents, clip by clip."""
        return vae.ClipDecoder(module, mesh)

    def decode_sound(self, component: str, module: torch.nn.Module, params: Params, value: jax.Array) -> jax.Array:
        """Decode latents [1, 2 A, C] as samples [2, samples]."""
        return audio.decode(module, params, value)


def _read_density(arrays: Mapping[str, Any]) -> float | None:
    """Return how dense attention is, by a program's arguments (`variant`); None for attention to all keys."""
    density: Density | None = arrays.get("density")
    return None if density is None else density.value
