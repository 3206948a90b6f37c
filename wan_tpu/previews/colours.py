"""A linear map from the latents' channels to colours, fitted to a model's own VAE.

The encoder is run on a few small random pictures, and least squares finds the colours that the latents stand for. That
is done on the host's CPU, so it takes neither a device's time nor its memory, and once for each VAE: the map, a few
hundred numbers, is kept in the cache folder. (Decoding random latents gives a worse map, because few latents of real
videos are like them.)
"""

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from wan_tpu.data import write_json
from wan_tpu.errors import OutputError
from wan_tpu.families.model import Model
from wan_tpu.families.shared.family_spec import FamilySpec
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.runtime.program import place
from wan_tpu.runtime.runtime import Runtime
from wan_tpu.stages.encode import vae_encode
from wan_tpu.storage.folder import cache_folder

SIDE = 16  # Height and width of the random pictures, in pixels of the latents.
_FEWEST = 4  # Pictures, at least.
_SAMPLES = 8  # Samples for each unknown of a colour, at least.
_SHADES = (2, 4, 8, 16, 32)  # How many soft shades a picture has in a row.
_RECTANGLES = 10
_RIDGE = 1e-3  # Damps directions that the samples say little about, as a share of the channels' variance.

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LatentColours:
    """A map from latents to colours.

    Attributes:
        weights: float32 [C, 3].
        bias: The colour of latents that are zero, float32 [3].
        error: Root mean square of the difference from the VAE's colours in the fit, where colours are in [0, 1].
    """

    weights: np.ndarray
    bias: np.ndarray
    error: float

    def paint(self, latents: np.ndarray) -> np.ndarray:
        """Return latents [C, T, H, W] as pictures, float32 [T, H, W, 3] in [0, 1]."""
        return np.clip(np.moveaxis(latents, 0, -1) @ self.weights + self.bias, 0, 1)


def fit_colours(latents: np.ndarray, colours: np.ndarray) -> LatentColours:
    """Return the map that explains colours [N, 3] by latents [N, C] with the least squared error."""
    samples = np.concatenate([latents, np.ones((len(latents), 1))], axis=1).astype(np.float64)
    damping = np.diag([_RIDGE * len(latents) * float(latents.var())] * latents.shape[1] + [0.0])
    solution = np.linalg.solve(samples.T @ samples + damping, samples.T @ colours)
    error = float(np.sqrt(np.mean((samples @ solution - colours) ** 2)))
    return LatentColours(solution[:-1].astype(np.float32), solution[-1].astype(np.float32), error)


def fit_to_vae(model: Model) -> LatentColours:
    """Fit the map to the VAE of a model's checkpoint, on this host's CPU.

    Raises:
        CheckpointError: The VAE's files are damaged.
        Unavailable: A file can't be read now.
        RuntimeError: JAX has no CPU here, because JAX_PLATFORMS leaves it out.
    """
    mesh = make_mesh((1, 1, 1), heads=model.spec.heads, devices=jax.local_devices(backend="cpu")[:1])
    runtime = Runtime(model, mesh, "float32", keep_weights=False)
    (channels, stride), generator = read_sizes(model), np.random.default_rng(0)
    count = max(_FEWEST, math.ceil(_SAMPLES * (channels + 1) / SIDE**2))
    pairs = [_encode(runtime, _draw(generator, SIDE * stride)) for _ in range(count)]
    return fit_colours(*(np.concatenate(part) for part in zip(*pairs, strict=True)))


def read_sizes(model: Model) -> tuple[int, int]:
    """Return the channels of a model's latents, and how many pixels are one of the latents, in height and width."""
    assert isinstance(model.spec, FamilySpec)
    return model.spec.latent_channels, model.spec.spatial_stride


def _draw(generator: np.random.Generator, side: int) -> np.ndarray:
    """Return a random picture [side, side, 3] in [0, 1]: soft shades of several sizes, and rectangles with edges."""
    picture = np.broadcast_to(generator.uniform(0.1, 0.9, 3), (side, side, 3)).copy()
    for cells in _SHADES:
        shades = generator.standard_normal((3, cells, cells)).astype(np.float32)
        enlarged = [Image.fromarray(shade).resize((side, side), Image.Resampling.BICUBIC) for shade in shades]
        picture += np.stack([np.asarray(shade) for shade in enlarged], axis=-1) / (4 * math.sqrt(cells))
    for _ in range(_RECTANGLES):
        height, width = generator.integers(side // 16, side // 2, 2)
        top, left = generator.integers(0, side - height), generator.integers(0, side - width)
        part = picture[top : top + height, left : left + width]
        part[:] = 0.8 * generator.uniform(0, 1, 3) + 0.2 * part
    return np.clip(picture, 0, 1).astype(np.float32)


def _encode(runtime: Runtime[Model], picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture's latents [N, C] as the transformer sees them, and the mean colours [N, 3] of their pixels."""
    model = runtime.model
    pixels = place((2 * picture - 1).transpose(2, 0, 1)[None, :, None], runtime.mesh)
    [moments] = vae_encode(runtime, [pixels])
    channels, _ = read_sizes(model)
    # Each channel of what the decoder takes is a linear function of the transformer's.
    shift, sum_ = (model.vae_latents(np.full((1, channels, 1, 1, 1), value, np.float32)) for value in (0, 1))
    latents = ((moments[:, :channels] - shift) / (sum_ - shift))[0, :, 0]
    height, width = latents.shape[1:]
    colours = picture.reshape(height, len(picture) // height, width, len(picture) // width, 3).mean(axis=(1, 3))
    return np.moveaxis(latents, 0, -1).reshape(-1, channels), colours.reshape(-1, 3)


# ---- The maps that this machine has fitted.


def load_colours(model: Model) -> LatentColours:
    """Return the map of a model's VAE, fitted now unless this machine has fitted it before; raises as `fit_to_vae`.

    Fitting takes seconds, so call it in a thread.
    """
    path = _path_of(model)
    try:
        return _read(path)
    except (OSError, ValueError, KeyError):
        pass
    colours = fit_to_vae(model)
    content = {"weights": colours.weights.tolist(), "bias": colours.bias.tolist(), "error": colours.error}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except (OSError, OutputError) as error:
        log.warning("the colours of previews aren't kept, and will be fitted again: %s", error)
    return colours


def _path_of(model: Model) -> Path:
    """Return where the map of a model's VAE is kept; its name changes with the VAE's files and with the method."""
    assert model.checkpoint is not None
    folder = model.components["decoder"].folder
    files = sorted((name, file.size, file.version) for name, file in model.checkpoint.weights(folder).items())
    method = [SIDE, _FEWEST, _SAMPLES, _SHADES, _RECTANGLES, _RIDGE]
    digest = hashlib.sha256(json.dumps([files, model.checkpoint.config(folder), method]).encode()).hexdigest()
    return cache_folder() / "previews" / f"{digest[:32]}.json"


def _read(path: Path) -> LatentColours:
    content = json.loads(path.read_text())
    weights, bias = (np.array(content[name], np.float32) for name in ("weights", "bias"))
    if weights.ndim != 2 or weights.shape[1] != 3 or bias.shape != (3,):
        raise ValueError(f"{path} isn't a map to colours")
    return LatentColours(weights, bias, float(content["error"]))
