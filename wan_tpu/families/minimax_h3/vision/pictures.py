"""Prepare keyframes for Qwen3-VL's vision tower: their size and their patches. It imports neither torch nor JAX.

The numbers are those of transformers' Qwen2VLImageProcessorPil with the settings of Qwen3-VL.

Shapes: h w rows and columns of tokens, each of which is made of two by two patches.
"""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from wan_tpu.families.minimax_h3 import classes
from wan_tpu.families.minimax_h3.config import MiniMaxH3Config
from wan_tpu.media.image import MAX_PIXELS, fit_image, resize_middle

CHANNELS, PATCH, MERGE = 3, 16, 2  # A patch has 16 x 16 pixels, a token 2 x 2 patches.
SIDE = PATCH * MERGE  # Pixels of a token's side.
MARKS = 2  # Rows of the text around those of a keyframe: where it begins and where it ends.


def fit_keyframes(images: Sequence[Image.Image], height: int, width: int, slack: int) -> list[Image.Image]:
    """Return keyframes in the size of the video.

    The first one, which gives the video its shape unless the request does, is fitted as any model's image is. The other
    one covers the video and is cut where it is larger, as in diffusers.
    """
    first, later = images[:1], images[1:]
    keyframes = [fit_image(image, height, width, slack=slack) for image in first]
    return keyframes + [cover(image, height, width) for image in later]


def cover(image: Image.Image, height: int, width: int) -> Image.Image:
    """Return the middle of an image, resized without a change of its shape until it covers a video."""
    if image.size == (width, height):
        return image
    scale = max(width / image.width, height / image.height)
    whole = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    if math.prod(whole) > MAX_PIXELS:
        return resize_middle(image, height, width, Image.Resampling.LANCZOS)
    left, top = (whole[0] - width) // 2, (whole[1] - height) // 2
    return image.resize(whole, Image.Resampling.LANCZOS).crop((left, top, left + width, top + height))


def fit_size(config: MiniMaxH3Config, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) in pixels at which the tower sees a keyframe of this size.

    It is the size itself, in whole tokens, unless it has fewer pixels than the tower sees, or more.
    """
    fewest, most = config.picture["shortest_edge"], config.picture["longest_edge"]
    sides = height, width
    whole = [round(side / SIDE) * SIDE for side in sides]
    scale = 1.0
    if math.prod(whole) > most:
        scale = math.sqrt(height * width / most)
        whole = [max(SIDE, math.floor(side / scale / SIDE) * SIDE) for side in sides]
    elif math.prod(whole) < fewest:
        scale = math.sqrt(fewest / (height * width))
        whole = [math.ceil(side * scale / SIDE) * SIDE for side in sides]
    return whole[0], whole[1]


def token_grid(config: MiniMaxH3Config, height: int, width: int) -> tuple[int, int]:
    """Return (h, w) of a keyframe of a size in pixels."""
    rows, columns = fit_size(config, height, width)
    return rows // SIDE, columns // SIDE


def clip_grid(frames: int, height: int, width: int) -> tuple[int, int]:
    """Return (h, w) of each pair of frames of a video, which is smaller if all of them have too many pixels."""
    rows, columns = fit_clip(frames, height, width)
    return rows // SIDE, columns // SIDE


def fit_clip(frames: int, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) in pixels at which the tower sees a video of that many frames.

    The numbers are those of transformers' Qwen3VLVideoProcessor without `cap_pixels_per_frame`.
    """
    fewest, most = classes.CLIP["shortest_edge"], classes.CLIP["longest_edge"]
    whole = [round(side / SIDE) * SIDE for side in (height, width)]
    pixels = round(frames / 2) * 2 * math.prod(whole)
    if pixels > most:
        scale = math.sqrt(frames * height * width / most)
        whole = [max(SIDE, math.floor(side / scale / SIDE) * SIDE) for side in (height, width)]
    elif pixels < fewest:
        scale = math.sqrt(fewest / (frames * height * width))
        whole = [math.ceil(side * scale / SIDE) * SIDE for side in (height, width)]
    return whole[0], whole[1]


def vision_rows(config: MiniMaxH3Config, height: int, width: int) -> int:
    """Return how many rows of the text a keyframe of this size takes, including its marks."""
    return math.prod(token_grid(config, height, width)) + MARKS


def cut_patches(config: MiniMaxH3Config, picture: Image.Image) -> np.ndarray:
    """Return the patches of an RGB image, uint8 [h, w, 4 C * 16 * 16], in the size at which the tower sees it."""
    size = fit_size(config, picture.height, picture.width)
    return _cut([_resize(picture, *size)])


def cut_pairs(pairs: np.ndarray, frames: int) -> np.ndarray:
    """Return the patches of pairs of a video's frames, uint8 [pairs, h, w, 8 C * 16 * 16].

    Args:
        pairs: uint8 [pairs, 2, H, W, 3].
        frames: How many frames there are, of which the last one may be there twice.
    """
    size = fit_clip(frames, *pairs.shape[2:4])
    return np.stack([_cut([_resize(Image.fromarray(frame), *size) for frame in pair]) for pair in pairs])


def _resize(picture: Image.Image, height: int, width: int) -> Image.Image:
    return picture if picture.size == (width, height) else picture.resize((width, height), Image.Resampling.BICUBIC)


def _cut(frames: Sequence[Image.Image]) -> np.ndarray:
    """Return the patches of one or two frames, uint8 [h, w, ...]."""
    grid = frames[0].height // SIDE, frames[0].width // SIDE
    pixels = np.stack([np.asarray(frame, np.uint8) for frame in frames])
    parts = pixels.reshape(len(frames), grid[0], MERGE, PATCH, grid[1], MERGE, PATCH, CHANNELS)
    return parts.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(*grid, -1)
