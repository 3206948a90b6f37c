"""The noise that a decoder takes with the latents: drawn on the host, while steps still run here or on other slices."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.families.model import Model
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.mesh import replicated_sharding

Noise = np.ndarray | None


def noise_sharding(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Return how noise [1, 3, F, H, W] is split: by columns, as the picture is, if they can be divided equally.

    Five seconds at 1080p are 1.5 GB, of which each device needs its own part only.
    """
    divides = shape[-1] % mesh.size == 0
    return NamedSharding(mesh, P(None, None, None, None, mesh.axis_names)) if divides else replicated_sharding(mesh)


def draw_noise(model: Model, request: ResolvedRequest, dtype: np.dtype) -> Noise:
    """Return a request's noise in the dtype of activations, or None if its decoder takes none."""
    if model.spec.decoder_noise_shape(request) is None:
        return None
    if dtype == np.float32:
        return model.draw_decoder_noise(request, torch.float32).numpy()
    # torch rounds what it draws in float32; NumPy knows bfloat16 only by its bits.
    bits = model.draw_decoder_noise(request, torch.bfloat16).view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)


def draw_ahead(model: Model, request: ResolvedRequest, dtype: np.dtype) -> Callable[[], Noise]:
    """Begin to draw a request's noise in another thread; return a function that waits for it and returns it.

    Five seconds at 1080p are 758 million numbers, 4.5 s of a core, which `draw_normal` divides among threads.
    """
    if model.spec.decoder_noise_shape(request) is None:
        return lambda: None
    thread = ThreadPoolExecutor(1, "decoder noise")
    drawn = thread.submit(draw_noise, model, request, dtype)
    thread.shutdown(wait=False)
    return drawn.result
