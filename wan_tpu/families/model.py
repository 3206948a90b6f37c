"""The interface of a family's model: its components, and the functions of its stages in JAX.

Shapes: B batch (guidance branches), T latent frames, H W latent height and width, L tokens, C channels.
"""

import abc
import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from wan_tpu.checkpoint import Checkpoint
from wan_tpu.families import family_of, list_published, published_spec, spec_of
from wan_tpu.families.noise import SeededNoise
from wan_tpu.families.shared.causal_vae import Chunks
from wan_tpu.families.shared.flop_count import Flops
from wan_tpu.families.shared.image_processing import ImageProcessor
from wan_tpu.families.shared.token_counts import Cut
from wan_tpu.families.shared.tokenizing import Tokenizer
from wan_tpu.plan import VIDEO, Expert, PromptText
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.bridge import Params
from wan_tpu.runtime.components import Component, Loaded
from wan_tpu.runtime.mesh import replicated_sharding


class StepInputs(NamedTuple):
    """The inputs of a transformer in one step.

    Attributes:
        latents: The video's, float32 [1, C, T, H, W].
        timestep: float32 scalar, or [2] with the next step's as well if the schedule has it (`Schedule.following`).
        guidance: float32 scalar, or a vector where the schedule has several scales.
        image_latents: As in `Conditioning`.
        audio: The sound's latents, float32 [1, ...], and their timestep; None for models without sound.
    """

    latents: jax.Array
    timestep: jax.Array
    guidance: jax.Array
    keys: dict[str, jax.Array]
    image_latents: jax.Array | None
    audio: tuple[jax.Array, jax.Array] | None = None


def apply_guidance(branches: jax.Array, guidance: jax.Array) -> jax.Array:
    """Combine the predictions of the prompt's and the negative prompt's branches, [B, ...], into one, [...]."""
    if len(branches) == 1:
        return branches[0]
    conditional, unconditional = branches
    return unconditional + guidance * (conditional - unconditional)


class Model(SeededNoise, abc.ABC):
    """One model of a family.

    Functions that take `module` and `params` are traced by `jax.jit`; all others run on the host. A step's inputs other
    than the latents, the "keys", are a dict of arrays that only the family interprets.

    Attributes:
        spec: Everything about the model that is known without JAX.
        config: A dataclass of everything that determines its programs; it is a part of the key of compiled programs.
        checkpoint: The source of tokenizers and the image processor; None for a published model, which can only be
            compiled.
        adapted_encoders: Components of the encoder stage that a request's adapters may change.
        text_rows: The length of a text that the shapes below are for, where texts of several lengths have programs of
            their own (`ModelSpec.text_rows`); otherwise 0.
        latents_dtype: The dtype of the latents to decode: float32 if the VAE denormalises them; None for the dtype of
            its weights.
    """

    adapted_encoders: tuple[str, ...] = ()
    text_rows: int = 0
    latents_dtype: Any = None

    def __init__(self, spec: Any, checkpoint: Checkpoint | None = None) -> None:
        """Create the model from a spec and its `config`."""
        self.spec = spec
        self.config: Any = spec.config
        self.checkpoint = checkpoint

    @property
    @abc.abstractmethod
    def components(self) -> dict[str, Component]:
        """Every component, by the name of its role."""

    @property
    @abc.abstractmethod
    def flops(self) -> Flops:
        """The floating-point operations of each stage."""

    def count_step(self, request: ResolvedRequest, expert: Expert, *, images: int) -> int:
        """Return the floating-point operations of one of an expert's steps; `images` is how many the request has."""
        shape = self.spec.latent_shapes(request, expert.stop)[VIDEO]
        branches = self.spec.count_evaluations(request, expert)
        return self.flops.step(shape, branches=branches, images=images)

    # ---- Shapes, for programs that are compiled before there is a request.

    def for_text(self, rows: int) -> Self:
        """Return the same model with the shapes for texts of `rows` rows, one of `ModelSpec.text_rows`."""
        model = copy.copy(self)
        model.text_rows = rows
        return model

    @property
    @abc.abstractmethod
    def text_shape(self) -> tuple[int, int]:
        """(L, C) of a prompt's embeddings."""

    @property
    def token_shapes(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Shapes of each text encoder's inputs, int32, by component; by default one encoder's ids and mask."""
        return {"text_encoder": ((1, self.text_shape[0]),) * 2}

    @property
    def prompt_shapes(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """For each array of `prompt_arrays`, its shape without the first axis, and whether it holds integers."""
        return {"text": (self.text_shape, False)}

    def image_prompt_shapes(self, request: ResolvedRequest, images: int) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return the same for a prompt that the text encoder reads together with that number of images."""
        return self.prompt_shapes

    def image_token_shapes(self, request: ResolvedRequest, images: int) -> dict[str, tuple[Any, ...]]:
        """Return shapes and dtypes of the inputs of text encoders that read images; none by default."""
        return {}

    @property
    def image_pixels_shape(self) -> tuple[int, int, int, int]:
        """(images, 3, height, width) of the image encoder's input; read only if the model has one."""
        raise NotImplementedError

    @property
    def image_features_shape(self) -> tuple[int, int, int]:
        """(images, L, C) of the image encoder's output; read only if the model has one."""
        raise NotImplementedError

    def image_latents_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of a request's image condition for latents of a shape; None if the model takes no image."""
        return None

    def image_latents_shapes(self, latent_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the image condition's shape for each number of images; a single shape if it doesn't depend on that."""
        usual = self.image_latents_shape(latent_shape)
        return () if usual is None else (usual,)

    def condition_shapes(self, request: ResolvedRequest, expert: Expert) -> tuple[tuple[int, ...], ...]:
        """Return the same for one of a request's experts, whose references may decide it."""
        return self.image_latents_shapes(self.spec.conditioned_shape(request, expert))

    def reference_shapes(self, request: ResolvedRequest, images: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Return the component, the shape and the dtype of each of `read_references`, for one of `images_of`."""
        return []

    def image_chunks(self, request: ResolvedRequest, images: int) -> list[tuple[int, int, int, int, int]]:
        """Return the shapes [1, 3, T, H, W] of the chunks of pixels that "vae_encoder" takes; by default the image."""
        return [(1, 3, 1, request.height, request.width)]

    def latent_chunks(self, request: ResolvedRequest) -> list[tuple[int, int, int, int, int]]:
        """Return the shapes [1, C, T, H, W] of the chunks of latents that "decoder" takes, in order."""
        batch, channels, frames, height, width = self.spec.decoded_shape(request)
        return [(batch, channels, count, height, width) for count in self.spec.decoder_chunks(frames)]

    # ---- The encoder stage.

    @functools.cached_property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        """The tokenizer of each text encoder, by component; by default that of the only one."""
        return {"text_encoder": self.open_tokenizer("tokenizer", self.config.text_encoder)}

    def open_tokenizer(self, folder: str, encoder: Mapping[str, Any]) -> Tokenizer:
        """Return the tokenizer in a folder of the checkpoint, for a text encoder with the configuration `encoder`."""
        assert self.checkpoint is not None
        return Tokenizer(self.checkpoint.path(folder), encoder["vocab_size"])

    @property
    def image_processor(self) -> ImageProcessor | None:
        """The image encoder's processor; None if the model has no image encoder."""
        return None

    def prepare(self, component: str) -> None:
        """Read what the host needs for a component in addition to its weights: a tokenizer, or the image processor.

        Raises:
            CheckpointError: The checkpoint has no working tokenizer or image processor.
            Unavailable: The disk or the machine fails.
        """
        if component in self.tokenizers:
            with self.tokenizers[component].lock():
                pass
        if component == "image_encoder" and self.image_processor is not None:
            self.image_processor.read()

    @abc.abstractmethod
    def tokenize(self, prompt: str) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return each text encoder's inputs, int32 [1, L], by component, and the cut if the prompt is too long.

        Encoders for which this prompt contains nothing to read are left out.
        """

    def tokenize_text(self, prompt: PromptText) -> tuple[dict[str, tuple[np.ndarray, ...]], list[Cut]]:
        """Return what `tokenize` does for a request's prompt, whose preset may say how it is read."""
        return self.tokenize(prompt.text)

    def tokenize_with_images(self, request: ResolvedRequest) -> tuple[dict[str, tuple[Any, ...]], list[Cut]]:
        """Return what `tokenize` does for a prompt and the images that the text encoder reads with it.

        Called only if the spec says that it does (`ModelSpec.reads_images`).
        """
        raise NotImplementedError

    def joined_with(self, component: str, *, images: bool = False) -> tuple[str, ...]:
        """Return the components that run after a text encoder, in the same program; more if it reads images."""
        return ()

    @abc.abstractmethod
    def encode_text(self, component: str, loaded: Sequence[Loaded], *tokens: jax.Array) -> Any:
        """Run one text encoder on its tokens [B, L] (ids and mask) and return embeddings [B, L, C], or several by name.

        Args:
            loaded: The text encoder, and the components that are joined with it.
        """

    def prompt_arrays(
        self, tokens: Mapping[str, tuple[np.ndarray, ...]], encoded: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Return the experts' inputs for a prompt, by name, [1, ...]; both arguments are keyed by component."""
        return {"text": encoded["text_encoder"]}

    def clip_pixels(self, request: ResolvedRequest) -> np.ndarray:
        """Return the request's image as the image encoder takes it, float32 [1, 3, height, width]."""
        raise NotImplementedError

    def encode_image(self, module: torch.nn.Module, params: Params, pixels: jax.Array) -> jax.Array:
        """Encode pixels [1, 3, height, width] as features [1, L, C]; called only if the model has an image encoder."""
        raise NotImplementedError

    def video_condition(self, request: ResolvedRequest) -> list[np.ndarray]:
        """Return the chunks of pixels that the VAE encodes for a request's image, float32 in [-1, 1]."""
        raise NotImplementedError

    def image_latents(self, moments: np.ndarray, request: ResolvedRequest) -> np.ndarray:
        """Turn the VAE encoder's output [1, 2C, T, H, W] into the image condition of `Conditioning`, float32."""
        raise NotImplementedError

    def read_references(
        self, request: ResolvedRequest
    ) -> tuple[list[tuple[str, np.ndarray]], dict[str, tuple[Any, ...]], list[Cut]]:
        """Read a request's references, and the image beside them; called only if it has references.

        Returns:
            What is encoded, each with the component that encodes it: pixels or samples; and what `tokenize` returns,
            for the prompt with its references.
        """
        raise NotImplementedError

    def encode_reference(
        self, component: str, module: torch.nn.Module, params: Params, mesh: Mesh, value: jax.Array
    ) -> jax.Array:
        """Run one of these components on one of these values; float32."""
        raise NotImplementedError

    def reference_latents(self, encoded: Sequence[np.ndarray], request: ResolvedRequest) -> np.ndarray:
        """Return what `encode_reference` has made of all of them as the image condition of `Conditioning`, float32."""
        raise NotImplementedError

    def vae_encoder(self, module: torch.nn.Module, mesh: Mesh) -> Chunks:
        """Return the functions that encode pixels as moments [1, 2C, T, H, W], chunk by chunk."""
        raise NotImplementedError

    # ---- Experts.

    @property
    def same_weights(self) -> Mapping[str, str]:
        """Components that share another component's weights, by name, such as a second stage's transformer."""
        return {}

    def renoise(self, request: ResolvedRequest, expert: Expert, *, has_image: bool) -> dict[str, np.ndarray]:
        """Return the float32 noise that is mixed into each part of the latents before an expert that enlarges them."""
        raise NotImplementedError

    def enlarge(self, loaded: Sequence[Loaded], mesh: Mesh, latents: jax.Array) -> jax.Array:
        """Return larger latents for the next expert, float32; called only if an expert enlarges them.

        Args:
            loaded: The components of the expert's stage that follow the transformer.
            latents: Float32 [1, C, T, H, W].
        """
        raise NotImplementedError

    def constants(
        self, request: ResolvedRequest, latent_shape: tuple[int, ...], text: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return arrays that every step needs in addition to the text's keys, computed on the host; none by default.

        Args:
            latent_shape: The shape of the video's latents.
            text: From `prompt_arrays`, for the prompt.
        """
        return {}

    def adds_weights(self, request: ResolvedRequest) -> bool:
        """Return whether a request's adapters add weights (`Component.added`), as those of a preset may."""
        return False

    def variant(self, request: ResolvedRequest) -> dict[str, Any]:
        """Return static values that choose a variant of the expert's programs, as pytrees without arrays; none usually.

        They are added to the text's arrays and to the constants, by name.
        """
        return {}

    @abc.abstractmethod
    def text_keys(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        text: Mapping[str, jax.Array],
        image: jax.Array | None,
    ) -> dict[str, jax.Array]:
        """Return what an expert computes from the prompts once per request: the keys for all of its steps.

        Args:
            text: Arrays of `prompt_arrays` by name, [B, ...]: the prompt's only, or the prompt's and the negative
                prompt's.
            image: [1, L, C], features of the image.
        """

    def key_shapes(self, mesh: Mesh, keys: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and shardings of the `text_keys`, to compile a step without them; replicated by default."""
        sharding = replicated_sharding(mesh)
        return {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding) for name, value in keys.items()}

    @abc.abstractmethod
    def velocity(self, module: torch.nn.Module, params: Params, mesh: Mesh, inputs: StepInputs) -> dict[str, jax.Array]:
        """Return the transformer's guided prediction for each part of the latents, float32, in the latents' shape."""

    def residual_shape(self, mesh: Mesh, branches: int, latent_shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the shape and sharding of what the blocks add to the tokens; called only if the model has `curves`."""
        raise NotImplementedError

    def cached_velocity(
        self,
        module: torch.nn.Module,
        params: Params,
        mesh: Mesh,
        inputs: StepInputs,
        reuse: tuple[jax.Array, jax.Array | None] | None,
    ) -> tuple[dict[str, jax.Array], jax.Array | None]:
        """Return `velocity`, and what the blocks added; called only if the model has `curves`.

        Args:
            reuse: What the blocks added before (`residual_shape`), and which branches reuse it, bool [B]. If that is
                None, all do, and no block is computed.
        """
        raise NotImplementedError

    def finish(self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest) -> np.ndarray:
        """Return the latents to decode, given those after the last step; by default, the same ones."""
        return latents

    def finish_sound(
        self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest
    ) -> np.ndarray:
        """Return the same for the sound's latents."""
        return latents

    # ---- The decoder stage.

    def given_sound(self, request: ResolvedRequest) -> np.ndarray | None:
        """Return the sound of a request's video, float32 [channels, samples], where it is given, not made."""
        return None

    def draw_decoder_noise(self, request: ResolvedRequest, dtype: torch.dtype) -> torch.Tensor:
        """Draw the decoder's noise for a request's seed, on the host; called only if it takes any."""
        raise NotImplementedError

    def vae_latents(self, latents: np.ndarray) -> np.ndarray:
        """Return the final latents as the VAE takes them, float32 [1, C, T, H, W]; unchanged by default."""
        return latents

    @abc.abstractmethod
    def vae_decoder(self, module: torch.nn.Module, mesh: Mesh) -> Chunks:
        """Return the functions that decode latents to pixels [1, 3, T, H, W] around [-1, 1], chunk by chunk."""

    def decode_sound(self, component: str, module: torch.nn.Module, params: Params, value: jax.Array) -> jax.Array:
        """Run one of the components that decode sound, on the latents or on the previous component's result.

        Called only if the model has sound. The last one returns samples, float32 [channels, samples] in [-1, 1].
        """
        raise NotImplementedError

    def pixels(self, decoded: np.ndarray) -> np.ndarray:
        """Return the decoder's output [1, 3, T, H, W] as float32 [T, H, W, 3] in [0, 1]."""
        unit = np.clip(decoded[0].astype(np.float32), -1, 1) / 2 + 0.5
        return unit.transpose(1, 2, 3, 0)


def open_model(checkpoint: Checkpoint) -> Model:
    """Return the model of a checkpoint; raises `CheckpointError` when no family knows it."""
    family = family_of(checkpoint)
    return family.part(family.model)(spec_of(checkpoint), checkpoint)


def published_model(name: str, decoder: str | None = None) -> Model:
    """Return a published model without its checkpoint; its programs can be compiled.

    Args:
        decoder: As for `published_spec`.
    """
    family = list_published()[name]
    return family.part(family.model)(published_spec(name, decoder), None)
