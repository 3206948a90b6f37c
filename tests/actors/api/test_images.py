"""Uploads: good images come back as plain PNGs, a corpus of broken and hostile ones as reasons."""

import asyncio
import base64
import io
import random
import struct
import zlib

import psutil
import pytest
from PIL import Image, PngImagePlugin

from actors.api.images.decoder import ImageDecoder, ImageLimits, data_url_content
from actors.api.images.decoder_process import REFUSED, clean
from wan_tpu.errors import InvalidRequest

LIMITS = ImageLimits(max_bytes=2_000_000)


def picture(width=40, height=30, mode="RGB"):
    made = Image.frombytes("RGB", (width, height), random.Random(0).randbytes(width * height * 3))
    return made.convert(mode)


def saved(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decoded(content, limits=LIMITS):
    return asyncio.run(ImageDecoder(limits).decode(content))


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, *chunks, depth=8, colours=2):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("WEBP", "RGB"), ("JPEG", "L")]
)
def test_images_come_back_as_plain_rgb(kind, mode):
    given = picture(mode=mode)
    content = saved(given, kind, **({"lossless": True} if kind == "WEBP" else {}))
    made = decoded(content)
    assert (made.width, made.height) == (40, 30)
    again = Image.open(io.BytesIO(made.png))
    assert (again.format, again.mode) == ("PNG", "RGB")
    assert again.tobytes() == Image.open(io.BytesIO(content)).convert("RGB").tobytes()


def test_it_is_upright_and_says_nothing_about_its_maker():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    exif[0x010F] = "CAMERA-OF-ANN"
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", "SECRET-NOTE")
    for content in (saved(picture(), "JPEG", exif=exif), saved(picture(), exif=exif, pnginfo=notes)):
        made = decoded(content + b"<script>TRAILING</script>")
        assert (made.width, made.height) == (30, 40)
        assert Image.open(io.BytesIO(made.png)).info == {}
        for told in (b"CAMERA", b"SECRET", b"TRAILING"):
            assert told not in made.png


def broken():
    """Name -> content of no image, or of none that is taken."""
    good = saved(picture())
    jpeg = saved(picture(), "JPEG")
    rows = zlib.compress(b"".join(b"\0" + bytes(90) for _ in range(30)))
    return {
        "empty": b"",
        "text": b"hello",
        "html": b"<html><img src=x></html>",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run",
        "pdf": b"%PDF-1.4\n",
        "gif": saved(picture(), "GIF"),
        "bmp": saved(picture(), "BMP"),
        "tiff": saved(picture(), "TIFF"),
        "ico": saved(picture(32, 32), "ICO"),
        "zeros": bytes(10_000),
        "noise": random.Random(1).randbytes(10_000),
        "png signature": good[:8],
        "png half": good[: len(good) // 2],
        "png header only": png(40, 30),
        "png of no width": png(0, 30, chunk(b"IDAT", rows)),
        "png of another size": png(4000, 3000, chunk(b"IDAT", rows)),
        "png checksum": good[:40] + bytes([good[40] ^ 255]) + good[41:],
        "png broken stream": png(30, 30, chunk(b"IDAT", rows[:-20])),
        "png no zlib": png(30, 30, chunk(b"IDAT", b"not deflate at all")),
        "png depth 3": png(30, 30, chunk(b"IDAT", rows), depth=3),
        "png 4 gigapixels": png(65535, 65535, chunk(b"IDAT", rows)),
        "png 2**31 wide": png(2**31 - 1, 1, chunk(b"IDAT", rows)),
        "png 65 megapixels": png(65_000, 1000, chunk(b"IDAT", zlib.compress(bytes(1000)))),
        "png text bomb": png(
            30, 30, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(200_000_000))), chunk(b"IDAT", rows)
        ),
        "jpeg half header": jpeg[:200],
        "jpeg no tables": jpeg[:2] + jpeg[-500:],
        "jpeg claims 65500 x 65500": _resized(jpeg, 65500),
        "webp signature": b"RIFF\x10\0\0\0WEBPVP8 ",
        "webp lossless garbage": b"RIFF\x40\0\0\0WEBPVP8L\x30\0\0\0\x2f" + bytes(range(47)),
    }


def _resized(jpeg, side):
    """A JPEG whose frame header claims another size."""
    start = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:start] + struct.pack(">HH", side, side) + jpeg[start + 4 :]


BROKEN = broken()
HOSTILE = ("png 4 gigapixels", "png 65 megapixels", "png text bomb", "svg", "jpeg claims 65500 x 65500")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_images_are_refused_with_a_reason(name):
    with pytest.raises(InvalidRequest) as refused:
        clean(BROKEN[name])
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused_by_the_process(name):
    with pytest.raises(InvalidRequest) as refused:
        decoded(BROKEN[name])
    assert "Traceback" not in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # such sizes are refused
def test_a_corrupted_file_is_an_image_or_refused():
    """Every kind of damage: bits flipped, parts doubled or missing."""
    source, rng = [saved(picture(), kind) for kind in ("PNG", "JPEG", "WEBP")], random.Random(2)
    outcomes = {True: 0, False: 0}
    for _ in range(1000):
        try:
            made = clean(_damaged(rng, source))
        except InvalidRequest:
            outcomes[False] += 1
        else:
            assert made.startswith(b"\x89PNG")
            outcomes[True] += 1
    assert min(outcomes.values()) > 50


def _damaged(rng, source):
    content = bytearray(rng.choice(source))
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(content))
        content[at : at + rng.choice((0, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 4)))
    return bytes(content)


@pytest.mark.long
def test_the_largest_image_that_is_taken_fits_into_the_memory_of_the_process():
    made = decoded(saved(Image.new("RGB", (8000, 8000), "teal"), compress_level=1))
    assert (made.width, made.height) == (8000, 8000)


def test_time_is_limited_and_nothing_is_left_running():
    content = saved(Image.new("RGB", (6000, 6000), "teal"), compress_level=1)
    with pytest.raises(InvalidRequest, match="more memory or time"):
        decoded(content, ImageLimits(timeout_s=0.05))
    mine = psutil.Process().children()  # others may be of other tests
    assert not [child for child in mine if "actors.api.images.decoder_process" in child.cmdline()]


def test_the_process_that_decodes_knows_no_secrets(monkeypatch):
    """Seen from outside: an environment with a poisoned interpreter setting doesn't reach it."""
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")  # a Python that sees this can't start
    assert decoded(saved(picture())).width == 40
    assert REFUSED not in (0, 1, 2)  # what Python itself ends with


def test_too_many_bytes_are_not_even_decoded():
    with pytest.raises(InvalidRequest, match="more than 2000000 bytes"):
        decoded(bytes(2_000_001))


def test_data_urls():
    content = saved(picture())
    encoded = base64.b64encode(content).decode()
    assert data_url_content(f"data:image/png;base64,{encoded}", LIMITS) == content
    assert data_url_content(f"data:image/png;name=a.png;base64,{encoded.replace('+', '%2B')}", LIMITS) == content
    assert data_url_content("data:,a%20b", LIMITS) == b"a b"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "https://host/cat.png",
        "data:",
        "data:image/png;base64",
        "data:image/png;base64,!!!",
        "data:image/png;base64,AAA",
        "data:image/png;base64,ä",
        "data:text/html,<script>",
        "data:application/pdf;base64,AAAA",
        "data:image/png;base64," + "A" * 9_000_000,
    ],
)
def test_what_is_no_data_url_of_an_image_is_refused(url):
    with pytest.raises(InvalidRequest):
        data_url_content(url, LIMITS)
