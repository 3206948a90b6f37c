"""Read the input image: any common format, upright, RGB, within limits."""

from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from wan_tpu.errors import InvalidRequest

# 64 megapixels decode to 192 MB of RGB; the largest model input is below 1 megapixel.
MAX_PIXELS = 64_000_000


def load_image(source: str | Path | Image.Image) -> Image.Image:
    """Return `source` as an upright RGB image.

    EXIF rotation is applied, transparency is dropped as `diffusers.utils.load_image` drops it, 16-bit
    images are scaled to 8 bits. Raises `InvalidRequest` for a missing, damaged or oversized file.
    """
    if isinstance(source, Image.Image):
        return _to_rgb(source)
    if not isinstance(source, str | Path):
        raise InvalidRequest(f"image is a {type(source).__name__}; give a path or a PIL.Image")
    path = Path(source)
    if not path.is_file():
        raise InvalidRequest(f"image {path} is not a file; give the path of a PNG, JPEG or WebP file")
    try:
        with Image.open(path) as image:
            return _to_rgb(image)
    except UnidentifiedImageError:
        raise InvalidRequest(f"image {path} is no image that Pillow can read; convert it to PNG or JPEG") from None
    except Image.DecompressionBombError:
        raise InvalidRequest(f"image {path} is too large; {_LIMIT}") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidRequest(f"image {path} is damaged ({error}); save it again as PNG or JPEG") from None


_LIMIT = f"at most {MAX_PIXELS // 1_000_000} megapixels are read (8000x8000): shrink it first"


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.width * image.height > MAX_PIXELS:
        raise InvalidRequest(f"the image is {image.width}x{image.height}; {_LIMIT}")
    if image.mode == "RGB" and not image.getexif():
        image.load()
        return image
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        upright = upright.point(lambda value: value / 256).convert("L")
    return upright.convert("RGB")
