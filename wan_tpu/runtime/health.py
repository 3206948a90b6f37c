"""Detect broken results, and name the place where they broke."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from wan_tpu.errors import UnhealthyResult

SINGLE_COLOUR_RANGE = 1 / 255  # One 8-bit level: a video that varies less than this counts as a single colour.


def check_finite(values: np.ndarray | bool, where: str) -> None:
    """Raise `UnhealthyResult` naming `where` unless all values are finite, or the flag is true."""
    is_healthy = values if isinstance(values, bool) else bool(np.isfinite(values.astype(np.float32)).all())
    if not is_healthy:
        raise UnhealthyResult(
            f"{where}: NaN or Inf in the result; check that the checkpoint is complete and try --precision float32"
        )


def keep_inf(limit: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return limit(x), but Inf where x is Inf, so that `check_finite` sees it."""
    return jnp.where(jnp.isinf(x), x, limit(x))


class ColourRange:
    """Tracks the smallest and largest value of each colour channel over a stream of frames."""

    def __init__(self) -> None:
        self._low = np.full(3, np.inf)
        self._high = np.full(3, -np.inf)

    def add(self, pixels: np.ndarray) -> None:
        """Look at the next pixels, float32 [T, H, W, 3]."""
        self._low = np.minimum(self._low, pixels.min(axis=(0, 1, 2)))
        self._high = np.maximum(self._high, pixels.max(axis=(0, 1, 2)))

    def check(self) -> None:
        """Raise `UnhealthyResult` when the whole video is a single colour."""
        if (self._high - self._low).max() < SINGLE_COLOUR_RANGE:
            colour = ", ".join(f"{value:.2f}" for value in self._low)
            raise UnhealthyResult(
                f"decoder: every pixel of the video is the same colour ({colour}); "
                "check the VAE's latents_mean and latents_std, and the shift"
            )
