"""Read the input image: any common format, upright, RGB, within limits."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from wan_tpu.errors import InvalidRequest, Unavailable
from wan_tpu.sources.disk import is_permanent

if TYPE_CHECKING:
    import numpy as np

# The decoders of Pillow that see files, wherever these come from: what cameras, phones, browsers and scanners write.
# Each more is one more that strangers may try; that of EPS runs another program.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
KINDS = "PNG, JPEG, WebP, AVIF, GIF, BMP or TIFF"
# 64 megapixels decode to 192 MB of RGB; the largest model input is below 1 megapixel.
MAX_PIXELS = 64_000_000
# Models know shapes near those of films and phones. Of a longer image a video has the middle.
_LONGEST = 4.0


def load_image(source: str | Path | Image.Image) -> Image.Image:
    """Return `source` as an upright RGB image.

    EXIF rotation is applied, transparency is dropped as `diffusers.utils.load_image` drops it, 16-bit
    images are scaled to 8 bits. Raises `InvalidRequest` for a missing, damaged or oversized file, `Unavailable` when
    the disk that it lies on fails.
    """
    if isinstance(source, Image.Image):
        return _to_rgb(source)
    if not isinstance(source, str | Path):
        raise InvalidRequest(f"image is a {type(source).__name__}; give a path or a PIL.Image")
    if str(source).startswith(("http://", "https://")):
        raise InvalidRequest(f"image {source} is a URL; download it and give the path of the file")
    path = Path(source)
    try:
        if not path.is_file():
            raise InvalidRequest(f"image {str(source)!r} is not a file; give the path of a {KINDS} file")
        with open(path, "rb") as file:
            return decode_image(file, str(path))
    except OSError as error:
        reason = error.strerror or error
        if not is_permanent(error):
            raise Unavailable(f"image {path} can't be read now ({reason}); check the disk, and try again") from None
        raise InvalidRequest(f"image {path} can't be read ({reason}); check the path and its permissions") from None


def decode_image(file: BinaryIO, source: str) -> Image.Image:
    """Return the image in an open file as upright RGB; `source` is its name for people, also in `info["source"]`.

    Of an animation it is the first picture.

    Raises `InvalidRequest` for a damaged or oversized image, `OSError` when the file can't be read.
    """
    try:
        with Image.open(file, formats=FORMATS) as image:
            upright = _to_rgb(image)
    except UnidentifiedImageError:
        raise InvalidRequest(f"image {source} is no {KINDS}; convert it to PNG or JPEG") from None
    except Image.DecompressionBombError:
        raise InvalidRequest(f"image {source} is too large; {_LIMIT}") from None
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the operating system: Pillow's own have none
            raise
        raise InvalidRequest(f"image {source} is damaged ({error}); save it again as PNG or JPEG") from None
    upright.info["source"] = source
    return upright


_LIMIT = f"at most {MAX_PIXELS // 1_000_000} megapixels are read (8000x8000): shrink it first"


def _to_rgb(image: Image.Image) -> Image.Image:
    if not image.width * image.height:
        raise InvalidRequest(f"the image is {image.width}x{image.height}; give one with at least one pixel")
    if image.mode in ("I", "F"):
        raise InvalidRequest(f"the image has 32-bit pixels (mode {image.mode}), whose range is unknown; save it as PNG")
    if image.width * image.height > MAX_PIXELS:
        raise InvalidRequest(f"the image is {image.width}x{image.height}; {_LIMIT}")
    if image.mode == "RGB" and not image.getexif():
        image.load()
        return image
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        upright = upright.convert("I").point(lambda value: value / 256).convert("L")  # big-endian ones have no point()
    return upright.convert("RGB")


def size_at_area(area: int, picture: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Return the (height, width) of an image's shape whose product is at most about `area`.

    So compute the examples of diffusers' pipelines, and, up to one multiple, Wan's own program.

    Args:
        area: Pixels of a frame.
        picture: (height, width) of the image.
        multiple: What both sides are multiples of.
    """
    shape = min(max(picture[0] / picture[1], 1 / _LONGEST), _LONGEST)
    height, width = (round(math.sqrt(side)) // multiple * multiple for side in (area * shape, area / shape))
    return max(height, multiple), max(width, multiple)


def has_shape(image: Image.Image, height: int, width: int, slack: int) -> bool:
    """Whether an image has a video's shape, but for `slack` pixels of a side."""
    off_width = abs(width - height * image.width / image.height)
    off_height = abs(height - width * image.height / image.width)
    return min(off_width, off_height) < slack


def fit_image(image: Image.Image, height: int, width: int, *, slack: int) -> Image.Image:
    """Return an RGB image in the size of its video, as `diffusers.image_processor.VaeImageProcessor.resize` does.

    An image of the video's shape (`has_shape`) is resized, as diffusers does by itself. Of another, what is beyond the
    video's shape is cut off on both sides: the "crop" of diffusers.
    """
    lanczos = Image.Resampling.LANCZOS
    if has_shape(image, height, width, slack):
        return image.resize((width, height), lanczos)
    wider = width / height > image.width / image.height
    inner_w = width if wider else image.width * height // image.height
    inner_h = image.height * width // image.width if wider else height
    whole = Image.new("RGB", (width, height))
    whole.paste(image.resize((inner_w, inner_h), lanczos), (width // 2 - inner_w // 2, height // 2 - inner_h // 2))
    return whole


def to_uint8(pixels: "np.ndarray") -> "np.ndarray":
    """Round pixels in [0, 1] to uint8, as `diffusers.image_processor.numpy_to_pil` does."""
    return (pixels * 255).round().astype("uint8")
