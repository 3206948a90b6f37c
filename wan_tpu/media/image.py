"""Read input images in any common format, within limits, and make them upright and RGB."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from wan_tpu.errors import InvalidRequest, Unavailable
from wan_tpu.sources.disk import is_permanent

if TYPE_CHECKING:
    import numpy as np

# The only Pillow decoders that are used, whatever the source of a file: the formats that cameras, phones, browsers and
# scanners write. Every further decoder would be one more for strangers to attack; that of EPS even runs another
# program.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
KINDS = "PNG, JPEG, WebP, AVIF, GIF, BMP or TIFF"
# 64 megapixels decode to 192 MB of RGB; the largest model input is below 1 megapixel.
MAX_PIXELS = 64_000_000
# Models were trained on aspect ratios near those of films and phones. A video shows the middle of a longer image.
_LONGEST = 4.0
_UNSEEN = 0.02  # By how much an image may be stretched, or be cut at its edges, without a warning.
_MARGIN = 16  # Pixels kept around the resized area, more than any filter reads.


def load_image(source: "str | Path | Image.Image | np.ndarray", name: str = "image") -> Image.Image:
    """Return `source`, a file, an image or uint8 [H, W, 3], as an upright RGB image.

    EXIF rotation is applied, transparency is dropped as `diffusers.utils.load_image` drops it, and 16-bit images are
    scaled to 8 bits. Errors call it `name`.

    Raises:
        InvalidRequest: The file is missing, damaged or too large.
        Unavailable: The disk that holds it fails.
    """
    if isinstance(source, Image.Image):
        return _to_rgb(source)
    if hasattr(source, "__array_interface__") and not isinstance(source, str | Path):  # NumPy itself is imported late.
        if str(source.dtype) != "uint8" or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise InvalidRequest(f"{name} is an array of {source.dtype} {list(source.shape)}; give uint8 [H, W, 3]")
        return Image.fromarray(source)
    if not isinstance(source, str | Path):
        raise InvalidRequest(f"{name} is a {type(source).__name__}; give a path, a PIL.Image or an array")
    if str(source).startswith(("http://", "https://")):
        raise InvalidRequest(f"{name} {source} is a URL; download it and give the path of the file")
    path = Path(source)
    try:
        if not path.is_file():
            raise InvalidRequest(f"{name} {str(source)!r} is not a file; give the path of a {KINDS} file")
        with open(path, "rb") as file:
            return decode_image(file, str(path))
    except OSError as error:
        reason = error.strerror or error
        if not is_permanent(error):
            raise Unavailable(f"{name} {path} can't be read now ({reason}); check the disk, and try again") from None
        raise InvalidRequest(f"{name} {path} can't be read ({reason}); check the path and its permissions") from None


def decode_image(file: BinaryIO, source: str) -> Image.Image:
    """Return the image in an open file as upright RGB; of an animation, the first picture.

    Args:
        file: The open file.
        source: Its name for people, which is also stored in the image's `info["source"]`.

    Raises:
        InvalidRequest: The image is damaged or too large.
        OSError: The file can't be read.
    """
    try:
        with Image.open(file, formats=FORMATS) as image:
            upright = _to_rgb(image)
    except UnidentifiedImageError:
        raise InvalidRequest(f"image {source} is no {KINDS}; convert it to PNG or JPEG") from None
    except Image.DecompressionBombError:
        raise InvalidRequest(f"image {source} is too large; {_LIMIT}") from None
    except (OSError, SyntaxError, ValueError) as error:
        # The operating system's errors have a number; Pillow's own have none.
        if isinstance(error, OSError) and error.errno is not None:
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
        # Converted to "I" first: big-endian images have no point().
        upright = upright.convert("I").point(lambda value: value / 256).convert("L")
    return upright.convert("RGB")


def size_at_area(area: int, picture: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Return the (height, width) of an image's shape whose product is at most about `area`.

    The examples of diffusers' pipelines compute it this way and, up to one multiple, Wan's own program does.

    Args:
        area: Pixels of a frame.
        picture: (height, width) of the image.
        multiple: Both sides are multiples of it.
    """
    shape = min(max(picture[0] / picture[1], 1 / _LONGEST), _LONGEST)
    height, width = (round(math.sqrt(side)) // multiple * multiple for side in (area * shape, area / shape))
    return max(height, multiple), max(width, multiple)


def has_shape(image: Image.Image, height: int, width: int, slack: int) -> bool:
    """Return whether an image has a video's shape to within `slack` pixels of a side."""
    off_width = abs(width - height * image.width / image.height)
    off_height = abs(height - width * image.height / image.width)
    return min(off_width, off_height) < slack


def describe_fit(name: str, picture: tuple[int, int], video: tuple[int, int], slack: int) -> str | None:
    """Return a warning if fitting an image to its video loses some of it, or changes its shape visibly.

    Args:
        name: What the image is called.
        picture: Its (height, width).
        video: Those of the video.
        slack: As in `fit_image`.
    """
    change = _measure_stretch(picture, video)
    if change <= _UNSEEN:
        return None
    near = has_shape(Image.new("1", (picture[1], picture[0])), *video, slack)
    fitted = f"stretched or cropped by {change:.1%}" if near else "cropped to the video's aspect ratio"
    return f"{name} is {picture[1]}x{picture[0]} but the video is {video[1]}x{video[0]}; it is {fitted}"


def describe_stretch(name: str, picture: tuple[int, int], fitted: tuple[int, int]) -> str | None:
    """Return a warning if resizing an image from one (height, width) to another changes its shape visibly."""
    change = _measure_stretch(picture, fitted)
    if change <= _UNSEEN:
        return None
    return f"{name} is {picture[1]}x{picture[0]}; it is stretched by {change:.1%}, to {fitted[1]}x{fitted[0]}"


def _measure_stretch(picture: tuple[int, int], fitted: tuple[int, int]) -> float:
    """Return by how much one side grows more than the other."""
    stretch = (picture[1] * fitted[0]) / (picture[0] * fitted[1])
    return max(stretch, 1 / stretch) - 1


def fit_image(
    image: Image.Image,
    height: int,
    width: int,
    *,
    slack: int,
    resample: Image.Resampling = Image.Resampling.LANCZOS,
) -> Image.Image:
    """Return an RGB image in the size of its video, as `diffusers.image_processor.VaeImageProcessor.resize` does.

    An image of the video's shape (`has_shape`) is resized, which is diffusers' default. Any other image is cropped on
    both sides to the video's shape, which is diffusers' "crop".
    """
    if has_shape(image, height, width, slack):
        return image.resize((width, height), resample)
    wider = width / height > image.width / image.height
    inner_w = width if wider else image.width * height // image.height
    inner_h = image.height * width // image.width if wider else height
    if inner_w * inner_h > MAX_PIXELS:
        return resize_middle(image, height, width, resample)
    whole = Image.new("RGB", (width, height))
    whole.paste(image.resize((inner_w, inner_h), resample), (width // 2 - inner_w // 2, height // 2 - inner_h // 2))
    return whole


def resize_middle(image: Image.Image, height: int, width: int, resample: Image.Resampling) -> Image.Image:
    """Resize the middle of an image, taking as much of it as fits the result's shape.

    The result is the same as resizing the image to cover the result and then cropping it, but that would take gigabytes
    for a long and narrow image, such as 1x10000.
    """
    part_w, part_h = min(image.width, image.height * width / height), min(image.height, image.width * height / width)
    left, top = (image.width - part_w) / 2, (image.height - part_h) / 2
    # Pillow's boxes are float32, so far from the corner they would be off by whole pixels.
    x, y = max(0, math.floor(left) - _MARGIN), max(0, math.floor(top) - _MARGIN)
    right, bottom = math.ceil(left + part_w) + _MARGIN, math.ceil(top + part_h) + _MARGIN
    part = image.crop((x, y, min(image.width, right), min(image.height, bottom)))
    left, top = left - x, top - y
    return part.resize((width, height), resample, box=(left, top, left + part_w, top + part_h))


def to_uint8(pixels: "np.ndarray") -> "np.ndarray":
    """Round pixels in [0, 1] to uint8, as `diffusers.image_processor.numpy_to_pil` does."""
    return (pixels * 255).round().astype("uint8")
