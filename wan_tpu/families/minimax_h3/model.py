"""The MiniMax-H3 family: video with sound from text, from first and last frames, or from references.

The reference for every formula is diffusers 0.42, modular_pipelines/minimax_h3.

Shapes: T latent frames, H W latent height and width, R rows of the text, A latents of each channel of the sound, C
channels.
"""

import collections
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from PIL import Image

from wan_tpu.families.minimax_h3 import (
    audio,
    components,
    context,
    positions,
    reference_inputs,
    references,
    text,
    transformer,
    vae,
)
from wan_tpu.families.minimax_h3.config import REFERENCE_FOLDER, STRIDE, TEXT_ROWS, MiniMaxH3Config
from wan_tpu.families.minimax_h3.flops import MiniMaxH3Flops
from wan_tpu.families.minimax_h3.reference_inputs import StaticRoom
from wan_tpu.families.minimax_h3.spec import DENOISE_REFERENCES, MiniMaxH3Spec
from wan_tpu.families.minimax_h3.vision import pictures, presentation, tower
from wan_tpu.families.minimax_h3.vision.pictures import fit_keyframes
from wan_tpu.families.minimax_h3.vision.presentation import Presentation
from wan_tpu.families.model import Model, StepInputs
from wan_tpu.families.shared.causal_vae import Chunks
from wan_tpu.families.shared.family_spec import DENOISE
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokens import patchify, unpatchify
from wan_tpu.ops.sparse_linear import Density
from wan_tpu.ops.video_sparse import Sparsity
from wan_tpu.plan import AUDIO, VIDEO, Expert
from wan_tpu.reference import count_read, find_goal, find_soundtrack, find_tail
from wan_tpu.request import IMAGES, ResolvedRequest
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.tail import Tail

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
            **self._reference_components,
        }

    @property
    def _reference_components(self) -> dict[str, Component]:
        """Components that only requests with references need."""
        if not self.spec.takes_references:
            return {}
        return {
            DENOISE_REFERENCES: components.transformer(self.config, REFERENCE_FOLDER),
            reference_inputs.CLIP: vae.clip_half(self.config),
            reference_inputs.VOICES: audio.audio_encoder(self.config),
        }

    @property
    def flops(self) -> MiniMaxH3Flops:
        """The floating-point operations of each stage."""
        return MiniMaxH3Flops(self.spec, self.text_rows)

    def count_step(self, request: ResolvedRequest, expert: Expert, *, images: int) -> int:
        """Return the operations of a step; sparse attention, unlike diffusers' module, leaves out most of the keys."""
        if request.references is not None:
            measures = references.measure(self.config, request)
            return self.flops.reference_step(self.spec.latent_shapes(request, expert.stop)[VIDEO], measures)
        operations, density = super().count_step(request, expert, images=images), self.spec.attention_density(request)
        shape, sparsity = self.spec.latent_shape(request), self.spec.sparsity(request)
        if sparsity is not None:
            density = self.flops.share_by_tiles(self._grid(shape), shape, sparsity, images=images)
            operations += self.flops.gates(shape, images=images)
        if density is None:
            return operations
        return operations - int((1 - density) * self.flops.attention(shape, images=images))

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
        """Return the shapes of a prompt's arrays with references, or with keyframes and which end each of them is."""
        if request.references is not None:
            rows = self._find_room(request).vision + self.text_rows
            text = {"text": ((rows, self.text_shape[1]), False), "positions": ((rows,), True)}
            return self.prompt_shapes | text
        _, rows = presentation.shapes(self.config, request.height, request.width, images, self.text_rows).ids.shape
        text = {"text": ((rows, self.text_shape[1]), False), "positions": ((rows,), True)}
        return self.prompt_shapes | text | {"anchors": ((images,), True)}

    def image_token_shapes(self, request: ResolvedRequest, images: int) -> dict[str, tuple[Any, ...]]:
        """Return the shapes of the text encoder's inputs with keyframes or references."""
        if request.references is not None:
            measures = references.measure(self.config, request)
            return {"text_encoder": presentation.reference_shapes(self.config, measures, self.text_rows)}
        size = request.height, request.width
        return {"text_encoder": presentation.shapes(self.config, *size, images, self.text_rows)}

    def image_latents_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of one keyframe's latents."""
        return (*latent_shape[:2], 1, *latent_shape[3:])

    def image_latents_shapes(self, latent_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one and of two keyframes' latents."""
        return tuple((*latent_shape[:2], count, *latent_shape[3:]) for count in (1, 2))

    def condition_shapes(self, request: ResolvedRequest, expert: Expert) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the rows of references, or those of keyframes."""
        if request.references is None:
            return super().condition_shapes(request, expert)
        room = self._find_room(request)
        channels = self.config.vae["latent_channels"] * math.prod(self.config.transformer["patch_size"])
        return ((1, reference_inputs.count_condition(room), channels),)

    def _find_room(self, request: ResolvedRequest) -> references.Room:
        return references.find_room(self.config, references.measure(self.config, request))

    def reference_shapes(self, request: ResolvedRequest, images: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Return what is encoded of images, of each clip of a video, and of sounds."""
        return reference_inputs.list_shapes(self.config, request)

    def image_chunks(self, request: ResolvedRequest, images: int) -> list[tuple[int, int, int, int, int]]:
        """Return the shapes of keyframes, each of which is a chunk."""
        return [(1, 3, 1, request.height, request.width)] * images

    # ---- The encoder stage.

    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return the ids of a prompt, int32 [1, R], and their number, and the cut if it is too long."""
        ids, count, cuts = text.tokenize_prompt(self.tokenizers["text_encoder"], prompt)
        return {"text_encoder": (ids, np.array([[count]], np.int32))}, cuts

    def tokenize_with_images(self, request: ResolvedRequest) -> tuple[dict[str, tuple[Any, ...]], list[Cut]]:
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
            return presentation.encode(loaded, Presentation._make(tokens))
        [encoder], (ids, _) = loaded, tokens
        return text.encode_prompt(encoder, ids)

    def prompt_arrays(
        self, tokens: Mapping[str, tuple[np.ndarray, ...]], encoded: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Return a prompt's embeddings, the index of each of its rows and the number of real ones.

        With keyframes or references, their rows come first; "anchors" says which end of the video each keyframe is.
        """
        read = tokens["text_encoder"]
        if isinstance(read, Presentation):
            anchors = {"anchors": read.anchors} if read.anchors.size else {}
            return {"text": encoded["text_encoder"], "positions": read.order, "count": read.count, **anchors}
        ids, count = read
        positions = np.arange(ids.shape[1], dtype=np.int32)[None]
        return {"text": encoded["text_encoder"], "positions": positions, "count": count}

    def read_references(
        self, request: ResolvedRequest
    ) -> tuple[list[tuple[str, np.ndarray]], dict[str, tuple[Any, ...]], list[Cut]]:
        """Return images, clips and sounds, and the prompt with the references before it."""
        files = reference_inputs.read_files(self.config, request)
        if not count_read(request.references):  # The prompt is read alone.
            return files.values, {}, []
        measures, shared = references.measure(self.config, request), self.tokenizers["text_encoder"]
        tokens, cuts = presentation.present_references(self.config, shared, request.prompt, measures, files.patches)
        return files.values, {"text_encoder": tokens}, cuts

    def encode_reference(
        self, component: str, module: torch.nn.Module, params: Params, mesh: Mesh, value: jax.Array
    ) -> jax.Array:
        """Encode an image, a clip of a video, or a sound."""
        return reference_inputs.encode(component, module, params, mesh, value)

    def reference_latents(self, encoded: Sequence[np.ndarray], request: ResolvedRequest) -> np.ndarray:
        """Return the rows of all references, float32 [1, rows, C]."""
        return reference_inputs.to_rows(self.config, request, encoded, np.float32(KEYFRAME_TIME))

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
        """Return the noise of video and sound, drawn in this order after that of keyframes or references.

        None is drawn for the video if `noise` replaces it.
        """
        generator = torch.Generator("cpu").manual_seed(request.seed)
        if request.references is None:
            self._draw_keyframes(request, images, generator)
        else:
            collections.deque(
                reference_inputs.draw_noises(self.config, references.measure(self.config, request), generator), maxlen=0
            )
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
        if request.references is not None:
            return self._place_references(request, latent_shape, rows, int(count))
        anchors = [ANCHORS[index] for index in text["anchors"][0]] if "anchors" in text else []
        places = positions.place_rows(
            (frames, height, width), (patch[0], patch[1]), sound, len(rows), int(count), anchors
        )
        vision = rows[: self._vision_rows(latent_shape, len(anchors))]
        keyframes = len(anchors) * self.spec.tokens((*latent_shape[:2], 1, height, width))
        ends = positions.find_ends(vision, len(anchors), int(count), keyframes, sound)
        if self.spec.sparsity(request) is not None:
            layout = positions.Layout(len(rows), keyframes, sound, self.spec.tokens(latent_shape), len(anchors))
            tiles = transformer.cut_tiles(self._grid(latent_shape), layout)
            places = places[positions.list_by_tiles(layout, int(count), tiles.order)]
            ends = positions.find_ends_by_tiles(ends, layout)
        return {"places": places, "ends": ends}

    def adds_weights(self, request: ResolvedRequest) -> bool:
        """Return whether a preset's adapter has the gates of video sparse attention."""
        return self.spec.sparsity(request) is not None and self.config.fasth3 is None

    def _place_references(
        self, request: ResolvedRequest, latent_shape: tuple[int, ...], order: np.ndarray, count: int
    ) -> dict[str, np.ndarray]:
        """Return the same for a request with references, and how many rows of theirs are real."""
        measures, patch = references.measure(self.config, request), self.config.transformer["patch_size"]
        room, real = references.find_room(self.config, measures), references.count_rows(patch, measures)
        sound = self.spec.audio_tokens(request.frames)
        rows = len(order) + room.visible + room.voices + sound + self.spec.tokens(latent_shape)
        _, _, frames, height, width = latent_shape
        blocks = [size.block for size in measures]
        places = positions.place_references(
            (frames, height, width), (patch[1], patch[2]), sound, order, count, blocks, rows
        )
        vision = references.count_vision(self.config, measures)
        ends = positions.end_references(vision, (count, *real), sound)
        return {"places": places, "ends": ends, "real": np.array(real, np.int32)}

    def variant(self, request: ResolvedRequest) -> dict[str, Any]:
        """Return how sparse attention is, where a preset makes it so, and the rows for references."""
        if request.references is not None:
            return {"references": StaticRoom(self._find_room(request))}
        density, sparsity = self.spec.attention_density(request), self.spec.sparsity(request)
        if sparsity is not None:
            return {"sparse": Sparsity(sparsity)}
        return {} if density is None else {"sparse": Density(density)}

    def _grid(self, latent_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the video's tokens in time, height and width, for latents [1, C, T, H, W]."""
        _, *patch = self.config.transformer["patch_size"]
        frames, *sides = latent_shape[2:]
        height, width = (side // part for side, part in zip(sides, patch, strict=True))
        return frames, height, width

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
        """Return the text's refined rows in the order of the prompt, [R, C], and the number of real ones.

        With references, images and videos come before all words.
        """
        [rows], [order], [[count]] = text["text"], text["positions"], text["count"]
        sparse = text.get("sparse")
        density = sparse.value if isinstance(sparse, Density) else None  # The text's two layers have no tiles.
        if "references" not in text:
            rows = rows[jnp.argsort(order)]
        refined = context.refine_text(module, params, mesh, rows, count, density)
        return {"text": refined, "count": count}

    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the velocities, float32, of the video [1, C, T, H, W] and of the sound [1, 2 A, C]."""
        assert inputs.audio is not None
        latents, (sound, sound_time), keys = inputs.latents, inputs.audio, inputs.keys
        patch, times = self.config.transformer["patch_size"], [inputs.timestep, sound_time]
        pictures, keyframes, voices, locked = 0, None, None, None
        if "references" in keys:
            assert inputs.image_latents is not None
            room = cast(StaticRoom, keys["references"]).room
            keyframes, heard = inputs.image_latents[0, : room.visible], inputs.image_latents[0, room.visible :]
            voices = heard[: room.voices, : sound.shape[2]]
            if room.locked:  # The given sound has no noise in any step.
                locked = sound = heard[None, room.voices :, : sound.shape[2]]
                times[1] = jnp.ones_like(sound_time)
            times += [jnp.maximum(inputs.timestep, KEYFRAME_TIME), jnp.ones_like(sound_time)]
        elif inputs.image_latents is not None:
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
            voices=voices,
            real=keys.get("real"),
        )
        layout = positions.Layout(
            text=len(rows.text),
            keyframes=0 if keyframes is None else len(keyframes),
            sound=sound.shape[1],
            video=len(rows.video),
            pictures=pictures,
            voices=None if voices is None else len(voices),
        )
        sparse: Any = keys.get("sparse")  # It is static, unlike the other keys.
        grid = self._grid(latents.shape)
        velocity, of_sound = transformer.predict(module, params, mesh, rows, layout, jnp.stack(times), sparse, grid)
        sound_velocity = of_sound[None] if locked is None else jnp.zeros_like(locked)
        return {VIDEO: unpatchify(velocity, latents.shape, patch), AUDIO: sound_velocity}

    def finish(self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest) -> np.ndarray:
        """Replace the frames that a video shares with those before and behind it by theirs."""
        for known in self._read_known(image_latents, request):
            count, frames = known.latents.shape[2], latents.shape[2]
            parts = [known.latents, latents[:, :, count:]]
            if known.is_goal:
                parts = [latents[:, :, : frames - count], known.latents]
            latents = np.concatenate(parts, axis=2)
        return latents

    def finish_sound(
        self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest
    ) -> np.ndarray:
        """Do the same with the sound's beginning. Its end lies between latents: `blend_goal` replaces the waveform."""
        if request.references is not None and (locked := self._find_room(request).locked):
            assert image_latents is not None
            return np.asarray(image_latents)[:, -locked:, : latents.shape[2]]
        channels = latents.reshape(2, -1, latents.shape[2])
        for known in self._read_known(image_latents, request):
            if not known.is_goal:
                channels = np.concatenate([known.sound, channels[:, known.sound.shape[1] :]], axis=1)
        return channels.reshape(latents.shape)

    def _read_known(
        self, image_latents: np.ndarray | None, request: ResolvedRequest
    ) -> Iterable[reference_inputs.Known]:
        if find_tail(request.references) is None and find_goal(request.references) is None:
            return ()
        assert image_latents is not None
        return reference_inputs.read_known(self.config, request, image_latents, np.float32(KEYFRAME_TIME))

    # ---- The decoder stage.

    def given_sound(self, request: ResolvedRequest) -> np.ndarray | None:
        """Return the soundtrack, at the rate of the model."""
        track = find_soundtrack(request.references)
        if track is None or not isinstance(track.source, Tail):
            return None
        return references.read_soundtrack(self.config, request, track.source)

    def vae_latents(self, latents: np.ndarray) -> np.ndarray:
        """Undo the normalisation; float32 [1, C, T, H, W]."""
        return vae.denormalise(self.config, latents)

    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> Chunks:
        """Return the functions that decode latents, clip by clip."""
        return vae.ClipDecoder(module, mesh)

    def decode_sound(self, component: str, module: torch.nn.Module, params: Params, value: jax.Array) -> jax.Array:
        """Decode latents [1, 2 A, C] as samples [2, samples]."""
        return audio.decode(module, params, value)
