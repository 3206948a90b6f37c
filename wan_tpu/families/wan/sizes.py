"""How Wan's own programs choose the size of a video that takes the shape of an image."""

import math
from fractions import Fraction


def below_area(area: int, picture: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Return the (height, width) of an image's shape with at most `area` pixels, each side rounded down.

    Source: `generate` in wan/image2video.py of github.com/Wan-Video/Wan2.2 at 42bf4cfa. It takes the root of a float64,
    so it makes 464 rows of an 832x480 image; here the root is exact.

    Args:
        area: Pixels of a frame.
        picture: (height, width) of the image.
        multiple: Both sides are multiples of it.
    """
    height, width = picture
    sides = math.isqrt(area * height // width), math.isqrt(area * width // height)
    below_height, below_width = (max(side // multiple, 1) * multiple for side in sides)
    return below_height, below_width


def closest_shape(area: int, picture: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Return the (height, width) with at most `area` pixels whose shape is closer to an image's.

    One candidate rounds the width down and then fits the height, the other does the reverse. Source: `best_output_size`
    in wan/utils/utils.py of github.com/Wan-Video/Wan2.2 at 42bf4cfa.

    Args:
        area: Pixels of a frame.
        picture: (height, width) of the image.
        multiple: Both sides are multiples of it.
    """
    height, width = below_area(area, picture, multiple)
    by_height = height, max(area // height // multiple, 1) * multiple
    by_width = max(area // width // multiple, 1) * multiple, width

    def distance(size: tuple[int, int]) -> Fraction:
        stretch = Fraction(size[1] * picture[0], size[0] * picture[1])
        return max(stretch, 1 / stretch)

    return by_width if distance(by_width) < distance(by_height) else by_height
