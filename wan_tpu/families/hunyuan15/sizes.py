"""Choose the default size of a video: the shape of the image, at an area that the model was trained on.

Source: hyvideo/utils/data_utils.py of github.com/Tencent-Hunyuan/HunyuanVideo-1.5, and diffusers'
HunyuanVideo15ImageProcessor, which both give the same sizes.
"""

import functools

STRIDE = 16  # Pixels per pixel of the latents, which is a token.
OVERLAP = 4  # The VAE's tiles overlap by their size divided by this.
_LONGEST = 4.0  # The largest ratio of the sides.


@functools.cache
def list_sizes(target: int) -> tuple[tuple[int, int], ...]:
    """Return (height, width) of all sizes of about target x target pixels, with the largest width for each height."""
    tokens, sizes = round((target / STRIDE) ** 2), []
    height, width = tokens, 1
    while height > 0:
        if max(height, width) <= _LONGEST * min(height, width):
            sizes.append((height * STRIDE, width * STRIDE))
        if height * (width + 1) <= tokens:
            width += 1
        else:
            height -= 1
    return tuple(sizes)


def default_size(target: int, height: float, width: float) -> tuple[int, int]:
    """Return the (height, width) for an image's: the size with the nearest shape that is no further from square.

    Shapes beyond all sizes get the longest one.
    """
    shape = height / width
    candidates = [(round(h / w, 5) - shape, (h, w)) for h, w in list_sizes(target)]
    squarer = [
        (difference, size) for difference, size in candidates if (difference <= 0 if shape >= 1 else difference >= 0)
    ]
    return min(squarer, key=lambda candidate: abs(candidate[0]))[1]
