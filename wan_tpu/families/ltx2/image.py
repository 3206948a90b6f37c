"""The pixels of a request's image as LTX-2's VAE encodes them, on the host."""

import math

import numpy as np
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf
from PIL import Image

from wan_tpu.media.image import fit_image

# How much images are compressed: as the frames that a model was trained on. Source: ltx_pipelines/utils/constants.py of
# github.com/Lightricks/LTX-2 at 400fd310; diffusers has the same.
CRF, CRF_25 = 33, 18
_LONGEST_SIDE = 16384  # Pixels of a picture that x264 compresses.


def compress(image: Image.Image, crf: int) -> Image.Image:
    """Return the image compressed with H.264, because the model was trained on compressed frames.

    Lightricks (ltx-pipelines 1.0.0, utils/media_io.py) and diffusers do this alike.

    Args:
        image: The image.
        crf: How much it is compressed, H.264's constant rate factor.
    """
    # H.264 has pairs of rows and columns, and not any number of them.
    scale = min(1.0, _LONGEST_SIDE / max(image.size))
    width, height = (max(2, round(side * scale)) for side in image.size)
    return Image.fromarray(apply_image_conditioning_crf(np.array(image.resize((width, height))), crf))


def fit_as_lightricks(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Return the middle of an image at the size of its video, float32 [height, width, 3] of 0 to 255.

    Each pixel is interpolated between its four neighbours in the image, however much the image shrinks: as
    `resize_and_center_crop` does, of ltx_pipelines/utils/media_io.py in ltx-pipelines 1.0.0.
    """
    scale = max(height / image.height, width / image.width)
    (top, bottom, down), (left, right, across) = (
        _neighbours(count, math.ceil(count * scale), shown)
        for count, shown in ((image.height, height), (image.width, width))
    )
    pixels, down, across = np.asarray(image), down[:, None, None], across[:, None]
    upper, lower = (
        (1 - across) * pixels[np.ix_(rows, left)] + across * pixels[np.ix_(rows, right)] for rows in (top, bottom)
    )
    return ((1 - down) * upper + down * lower).astype(np.float32)


def _neighbours(count: int, resized: int, shown: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for the middle of a resized side, both pixels that each one lies between, and the second one's weight.

    Args:
        count: The pixels of the image's side.
        resized: The pixels that it is resized to.
        shown: How many of them are shown.
    """
    centres = np.arange(shown) + (resized - shown) // 2 + np.float32(0.5)
    # In float32, as torch computes them: far from the first pixel, rounding moves a position.
    positions = np.maximum(centres.astype(np.float32) * (np.float32(count) / np.float32(resized)) - np.float32(0.5), 0)
    first = positions.astype(int)
    return first, np.minimum(first + 1, count - 1), positions - first.astype(np.float32)


def fit_as_diffusers(image: Image.Image, height: int, width: int, *, slack: int) -> np.ndarray:
    """Return the same as diffusers resizes it, with all pixels of the image; `slack` as in `fit_image`."""
    frame = fit_image(image, height, width, slack=slack, resample=Image.Resampling.BILINEAR)
    return np.asarray(frame, np.float32)
