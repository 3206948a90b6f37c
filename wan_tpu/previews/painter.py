"""Paint clean latents as one picture: four frames, spread over the video, or one with details."""

import io
import math
import threading
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from wan_tpu.errors import InvalidInput
from wan_tpu.families.model import Model
from wan_tpu.media.image import to_uint8
from wan_tpu.media.sheet import WIDEST, grid, spread_evenly
from wan_tpu.previews.colours import LatentColours, load_colours, read_sizes
from wan_tpu.previews.taehv import ENLARGEMENTS, TinyDecoder
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.mesh import make_mesh

FRAMES, COLUMNS = 4, 2
_SEEN = 2  # Latent frames that the tiny decoder sees; the picture is that of the last one.
# The tiny decoder enlarges latents up to this width, pixels, so that it costs little; `paint` then resizes the picture.
_DETAILED = 160


def encode_jpeg(picture: Image.Image) -> bytes:
    """Return a picture as a JPEG."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return file.getvalue()


class Painter:
    """Paints a model's latents, with a tiny decoder if there is one, else by the map from latents to colours.

    All of it runs on the host's CPU: a device may have no memory left, and a preview must not take what a step needs.
    """

    def __init__(self, model: Model, decoder: str | Path | None = None) -> None:
        """Read the tiny decoder, if there is one. The map is fitted when it is needed.

        Args:
            model: The model.
            decoder: A file of TAEHV (`wan_tpu.previews.taehv`), or None.

        Raises:
            InvalidInput: The file isn't a decoder for this model.
        """
        self._model = model
        self._loading = threading.Lock()
        self._with: TinyDecoder | LatentColours | None = None if decoder is None else self._open(decoder)

    def prepare(self) -> None:
        """Fit the map, if it is needed; later calls do nothing. Raises as `wan_tpu.previews.colours.fit_to_vae`."""
        self._load()

    def paint(self, latents: np.ndarray, image_latents: np.ndarray | None, request: ResolvedRequest) -> Image.Image:
        """Return a picture of clean latents.

        Args:
            latents: float32 [1, C, T, H, W], of the video or of a chunk of it, at the full size or at a smaller one.
            image_latents: As in `Conditioning`.
            request: The request.
        """
        loaded = self._load()
        latents = self._model.finish(latents, image_latents, request)[0]
        width = min(WIDEST, request.width)
        height = max(1, round(request.height * width / request.width))
        if isinstance(loaded, TinyDecoder):
            # Before the first frame there are zeros; the first frame stands twice here, which is nearly the same.
            middle = latents.shape[1] // 2
            clip = latents[:, [max(0, middle + 1 - k) for k in range(_SEEN, 0, -1)]].swapaxes(0, 1)
            enlargements = max(0, min(ENLARGEMENTS, int(math.log2(_DETAILED / latents.shape[3]))))
            pictures = loaded.decode(clip[None], enlargements=enlargements)[:, -1].transpose(0, 2, 3, 1)
        else:
            pictures = loaded.paint(latents[:, spread_evenly(latents.shape[1], FRAMES)])
        frames = [Image.fromarray(picture) for picture in to_uint8(pictures)]
        return grid([frame.resize((width, height), Image.Resampling.BICUBIC) for frame in frames], columns=COLUMNS)

    def _load(self) -> TinyDecoder | LatentColours:
        with self._loading:
            if self._with is None:
                self._with = load_colours(self._model)
            return self._with

    def _open(self, path: str | Path) -> TinyDecoder:
        mesh = make_mesh((1, 1, 1), heads=self._model.spec.heads, devices=jax.local_devices(backend="cpu")[:1])
        decoder, channels = TinyDecoder(path, mesh), read_sizes(self._model)[0]
        if decoder.channels != channels:
            raise InvalidInput(
                f"{path} decodes latents of {decoder.channels} channels, but those of {self._model.spec.name} have "
                f"{channels}; give the file for this model, or none"
            )
        return decoder
