"""The functions of a model that denoises a video chunk after chunk (`ModelSpec.chunk_frames`)."""

import abc
from collections.abc import Sequence

import jax
import numpy as np

from wan_tpu.plan import Expert
from wan_tpu.request import ResolvedRequest


class ChunkedModel(abc.ABC):
    """The additional functions of such a family's `wan_tpu.families.model.Model`.

    Its latents have no part but the video, and `finish` leaves them unchanged: each chunk is decoded, and passed to the
    next chunk, exactly as its last step left it.
    """

    @abc.abstractmethod
    def chunk_noise(
        self, request: ResolvedRequest, expert: Expert, generator: np.ndarray | None, images: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a chunk's initial noise, or the noise that is mixed into latents before an expert that enlarges them.

        Args:
            request: The request; its pixels aren't needed.
            expert: The expert whose first step uses the noise.
            generator: The state of the request's generator (`torch.Generator.get_state`), uint8; None if nothing has
                been drawn.

        Returns:
            The noise, float32 of the shape of the expert's latents, and the generator's state after it.
        """

    @abc.abstractmethod
    def renoising(self, request: ResolvedRequest, expert: Expert) -> tuple[float, float]:
        """Return the factors by which the enlarged latents and the noise are multiplied when an expert mixes them."""

    @abc.abstractmethod
    def enlarge_chunk(self, latents: jax.Array) -> jax.Array:
        """Return the latents [1, C, T, H, W] at the size of the next expert's; traced by `jax.jit`."""

    def count_source(self, request: ResolvedRequest) -> int:
        """Return how many frames a request's video has; called only if the model continues videos.

        Raises:
            InvalidRequest: The frames are too few, or the file can't be read.
        """
        raise NotImplementedError

    def condition(
        self, moments: np.ndarray, request: ResolvedRequest, source_frames: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the condition that chunks use from a request's image or video; called only if the model takes any.

        Args:
            moments: The VAE encoder's output [1, 2C, T, H, W] for `Model.video_condition`.
            source_frames: How many frames its video has; None for an image.

        Returns:
            The condition, as `image_latents` of `chunk_history`, and the state of the request's generator after it.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def chunk_history(
        self, request: ResolvedRequest, chunks: Sequence[np.ndarray], image_latents: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Return what all steps of a chunk need from earlier chunks, by name; `velocity` gets it with the keys.

        Args:
            chunks: The latents of the earlier chunks, each float32 [1, C, T, H, W].
            image_latents: As in `Conditioning`, or its `video_latents`.
        """
