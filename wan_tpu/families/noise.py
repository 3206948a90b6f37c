"""The random numbers of a request, drawn as diffusers draws them for its seed."""

from collections.abc import Callable

import numpy as np
import torch

from wan_tpu.plan import VIDEO
from wan_tpu.request import ResolvedRequest
from wan_tpu.spec import ModelSpec


class SeededNoise:
    """Draws the initial noise of each part of the latents, and the fresh noise of later steps, on the host."""

    spec: ModelSpec

    def initial_noise(self, request: ResolvedRequest) -> np.ndarray:
        """Return the noise that diffusers draws for a request's seed, float32 [1, C, T, H, W]."""
        return self._draw_noise(request, self._first_generator(request))

    def initial_noises(self, request: ResolvedRequest, noise: np.ndarray | None, images: int) -> dict[str, np.ndarray]:
        """Return the initial noise of each part of the latents, float32.

        Args:
            request: The request; its pixels aren't needed.
            noise: The video's noise, to use instead of drawing it.
        """
        return {VIDEO: self.initial_noise(request) if noise is None else noise}

    def step_noise(
        self, request: ResolvedRequest, *, own_noise: bool = False
    ) -> Callable[[int], dict[str, np.ndarray]]:
        """Return a function that draws a step's fresh noise, float32, for each part of the latents that takes some.

        It is used if the schedule has fresh noise; a step that draws none returns the noise before it, which its matrix
        multiplies by 0. Steps should be asked for in order, because all noise comes from one generator: to go back to
        an earlier step, all noise is drawn again from the beginning.

        Args:
            request: The request.
            own_noise: Whether the caller supplied the initial noise, so that the generator hasn't drawn it.
        """
        draws = self.spec.schedule(request).draws
        draw_count, generator = 0, self._step_generator(request, own_noise)
        latest: dict[str, np.ndarray] = {}

        def noise(step: int) -> dict[str, np.ndarray]:
            nonlocal draw_count, generator, latest
            needed = sum(draws[: step + 1])
            if needed < draw_count:
                draw_count, generator = 0, self._step_generator(request, own_noise)
            for _ in range(needed - draw_count):
                latest = self._draw_step(request, generator)
            draw_count = needed
            return latest

        return noise

    def _draw_step(self, request: ResolvedRequest, generator: torch.Generator) -> dict[str, np.ndarray]:
        """Draw the noise of a step, by part: only the video's by default."""
        return {VIDEO: self._draw_noise(request, generator)}

    def _step_generator(self, request: ResolvedRequest, own_noise: bool) -> torch.Generator:
        """Return the request's generator in its state before the first step."""
        generator = self._first_generator(request)
        if not own_noise:
            self._draw_noise(request, generator)
        return generator

    def _first_generator(self, request: ResolvedRequest) -> torch.Generator:
        """Return the request's generator in its state before the video's noise is drawn."""
        return torch.Generator("cpu").manual_seed(request.seed)

    def _draw_noise(self, request: ResolvedRequest, generator: torch.Generator) -> np.ndarray:
        """Draw noise, float32 [1, C, T, H, W]."""
        return torch.randn(self.spec.latent_shape(request), generator=generator, dtype=torch.float32).numpy()
