"""The size that a video has where nobody asks for one: of the shape of the image, and of the area that a model knows.

Source: hyvideo/utils/data_utils.py of github.com/Tencent-Hunyuan/HunyuanVideo-1.5, and HunyuanVideo15ImageProcessor of
diffusers, with both of which it agrees.
"""

import functools

STRIDE = 16  # pixels to a pixel of the latents, which is a token
OVERLAP = 4  # of the VAE's tiles: a quarter
_LONGEST = 4.0  # times the other side


@functools.cache
def sizes(target: int) -> tuple[tuple[int, int], ...]:
    """Return (height, width) of all sizes of about target x target pixels: for each height the greatest width."""
    tokens, found = round((target / STRIDE) ** 2), []
    height, width = tokens, 1
    while height > 0:
        if max(height, width) <= _LONGEST * min(height, width):
            found.append((height * STRIDE, width * STRIDE))
        if height * (width + 1) <= tokens:
            width += 1
        else:
            height -= 1
    return tuple(found)


def default_size(target: int, height: float, width: float) -> tuple[int, int]:
    """Return the (height, width) for an image's: the size of the nearest shape that is no further from a square.

    A shape beyond all sizes takes the longest of them.
    """
    shape = height / width
    known = [(round(h / w, 5) - shape, (h, w)) for h, w in sizes(target)]
    nearer = [one for one in known if (one[0] <= 0 if shape >= 1 else one[0] >= 0)]
    return min(nearer, key=lambda one: abs(one[0]))[1]
