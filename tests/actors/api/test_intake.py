"""Parsing of bodies and images: good images become plain PNGs, and broken or hostile input an error."""

import asyncio
import base64
import io
import json
import random
import struct
import time
import zlib

import numpy as np
import psutil
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, PngImagePlugin

from actors.api.limits import ServiceLimits
from actors.api.untrusted.body_parts import FORM, JSON, PICTURE
from actors.api.untrusted.memory_file import open_memory_file
from actors.api.untrusted.reader import Reader
from actors.api.untrusted.reader_process import REFUSED, encode_png, open_image
from actors.api.untrusted.references import IMAGE, LAST, decode_data_url
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.image import FORMATS
from wan_tpu.media.shown import Fit

LIMITS = ServiceLimits(image_bytes=2_000_000)


def picture(width=40, height=30, mode="RGB"):
    image = Image.frombytes("RGB", (width, height), random.Random(0).randbytes(width * height * 3))
    return image.convert(mode)


def encode_as(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def read_image(content, limits=LIMITS, *, size=None, slack=16):
    """Return the PNG that a process makes of an image, by default in the image's own size."""

    async def make():
        with open_memory_file(content) as file:
            async with Reader(limits).read(PICTURE, file, "ann") as reading:
                return await reading.make_picture(Fit(*(size or reading.sizes[IMAGE]), slack))

    return asyncio.run(make())


def test_two_images_come_out_one_by_one_each_with_its_own_size():
    first, second = (Image.effect_noise(size, 50).convert("RGB") for size in ((30, 20), (64, 48)))
    body = form((IMAGE, NAMED, encode_as(first)), (LAST, NAMED, encode_as(second)), ("prompt", "", b"x"))

    async def read_both():
        with open_memory_file(body) as file:
            async with Reader(LIMITS).read(FORM_X, file, "ann") as reading:
                assert reading.sizes == {IMAGE: (20, 30), LAST: (48, 64)} and set(reading.uploads) == {IMAGE, LAST}
                return [await reading.make_picture(Fit(16, 32, 32), name) for name in (LAST, IMAGE)]

    pngs = asyncio.run(read_both())
    for content, source in zip(pngs, (second, first), strict=True):
        got = Image.open(io.BytesIO(content))
        assert np.array_equal(np.asarray(got), np.asarray(source.resize((32, 16), Image.Resampling.LANCZOS)))


def test_a_bad_last_frame_is_said_to_be_that():
    body = form((IMAGE, NAMED, encode_as(Image.new("RGB", (30, 20)))), (LAST, NAMED, b"nothing"))
    with pytest.raises(InvalidRequest) as raised:
        read(FORM_X, body)
    assert raised.value.field == LAST


def clean(content):
    return encode_png(open_image(content))


def read(content_type, content, limits=LIMITS):
    async def start():
        with open_memory_file(content) as file:
            async with Reader(limits).read(content_type, file, "ann") as reading:
                return reading

    return asyncio.run(start())


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def a_png(width, height, *chunks, depth=8, colours=2):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *[("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("WEBP", "RGB"), ("JPEG", "L"), ("AVIF", "RGB")],
        *[("GIF", "P"), ("TIFF", "RGB"), ("TIFF", "CMYK"), ("BMP", "RGB")],
    ],
)
def test_images_come_back_as_plain_rgb(kind, mode):
    source = picture(mode=mode)
    content = encode_as(source, kind, **({"lossless": True} if kind == "WEBP" else {}))
    again = Image.open(io.BytesIO(clean(content)))
    assert (again.format, again.mode, again.size) == ("PNG", "RGB", (40, 30))
    assert again.tobytes() == Image.open(io.BytesIO(content)).convert("RGB").tobytes()


def test_image_comes_back_upright_and_without_its_metadata():
    exif = Image.Exif()
    exif[0x0112] = 6  # Rotated by 90 degrees.
    exif[0x010F] = "CAMERA-OF-ANN"
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", "SECRET-NOTE")
    for content in (encode_as(picture(), "JPEG", exif=exif), encode_as(picture(), exif=exif, pnginfo=notes)):
        result = read_image(content + b"<script>TRAILING</script>")
        assert Image.open(io.BytesIO(result)).size == (30, 40)
        assert Image.open(io.BytesIO(result)).info == {}
        for secret in (b"CAMERA", b"SECRET", b"TRAILING"):
            assert secret not in result


def make_hostile_files():
    """Return functions that make hostile or unsupported content, by name."""
    good = encode_as(picture())
    jpeg = encode_as(picture(), "JPEG")
    rows = zlib.compress(b"".join(b"\0" + bytes(90) for _ in range(30)))
    return {
        "empty": lambda: b"",
        "text": lambda: b"hello",
        "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "jpeg 2000": lambda: encode_as(picture(), "JPEG2000"),
        "avif half": lambda: encode_as(picture(), "AVIF")[:200],
        "ico": lambda: encode_as(picture(32, 32), "ICO"),
        "png half": lambda: good[: len(good) // 2],
        "png header only": lambda: a_png(40, 30),
        "png of another size": lambda: a_png(4000, 3000, chunk(b"IDAT", rows)),
        "png checksum": lambda: good[:40] + bytes([good[40] ^ 255]) + good[41:],
        "png broken stream": lambda: a_png(30, 30, chunk(b"IDAT", rows[:-20])),
        "png no zlib": lambda: a_png(30, 30, chunk(b"IDAT", b"not deflate at all")),
        "png 4 gigapixels": lambda: a_png(65535, 65535, chunk(b"IDAT", rows)),
        "jpeg half header": lambda: jpeg[:200],
        "jpeg no tables": lambda: jpeg[:2] + jpeg[-500:],
        "jpeg claims 65500 x 65500": lambda: _claim_size(jpeg, 65500),
        "webp lossless garbage": lambda: b"RIFF\x40\0\0\0WEBPVP8L\x30\0\0\0\x2f" + bytes(range(47)),
    }


def _claim_size(jpeg, side):
    """Return a JPEG whose frame header claims another size."""
    start = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:start] + struct.pack(">HH", side, side) + jpeg[start + 4 :]


BROKEN = make_hostile_files()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_images_are_refused_with_a_reason(name):
    with pytest.raises(InvalidRequest) as refused:
        clean(BROKEN[name]())
    assert len(str(refused.value).splitlines()) == 1


def test_hostile_image_is_refused_by_the_process():
    bomb = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(200_000_000)))
    with pytest.raises(InvalidRequest) as refused:
        read_image(a_png(30, 30, bomb, chunk(b"IDAT", zlib.compress(bytes(91 * 30)))))
    assert "Traceback" not in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # Such sizes are refused.
@pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")
def test_a_corrupted_file_is_an_image_or_refused():
    """All kinds of damage occur: flipped bits, repeated and missing parts."""
    source, rng = [encode_as(picture(), kind) for kind in FORMATS], random.Random(2)
    outcomes = {True: 0, False: 0}
    for _ in range(1000):
        try:
            result = clean(_damage(rng, source))
        except InvalidRequest:
            outcomes[False] += 1
        else:
            assert result.startswith(b"\x89PNG")
            outcomes[True] += 1
    assert min(outcomes.values()) > 50


def _damage(rng, source):
    content = bytearray(rng.choice(source))
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(content))
        content[at : at + rng.choice((0, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 4)))
    return bytes(content)


@pytest.mark.long
def test_the_largest_image_that_is_taken_fits_into_the_memory_of_the_process():
    result = read_image(encode_as(Image.new("RGB", (8000, 8000), "teal"), compress_level=1))
    assert Image.open(io.BytesIO(result)).size == (8000, 8000)


def test_time_is_limited_and_nothing_is_left_running():
    content = encode_as(Image.new("RGB", (6000, 6000), "teal"), compress_level=1)
    with pytest.raises(InvalidRequest):
        read_image(content, ServiceLimits(reader_s=0.05))
    mine = psutil.Process().children()  # Other processes may belong to other tests.
    assert not [child for child in mine if "actors.api.untrusted.reader_process" in child.cmdline()]


def test_the_process_that_decodes_knows_no_secrets(monkeypatch):
    """A poisoned interpreter setting in the environment doesn't reach the process."""
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")  # A Python that sees this can't start.
    assert Image.open(io.BytesIO(read_image(encode_as(picture())))).width == 40
    assert REFUSED not in (0, 1, 2)  # Python itself exits with these.


def test_too_many_bytes_are_not_even_decoded():
    with pytest.raises(InvalidRequest, match="2000000"):
        read_image(bytes(2_000_001))


def test_data_url_is_decoded_whatever_its_form():
    content = encode_as(picture())
    encoded = base64.b64encode(content).decode()
    assert decode_data_url(f"data:image/png;base64,{encoded}") == content
    assert decode_data_url(f"data:image/png;name=a.png;base64,{encoded.replace('+', '%2B')}") == content
    assert decode_data_url("data:,a%20b") == b"a b"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:image/png;base64",
        "data:image/png;base64,!!!",
        "data:image/png;base64,ä",
        "data:application/pdf;base64,AAAA",
        "data:image/png" + ";" * 1_000_000 + ",A",
    ],
)
def test_url_without_an_image_is_refused(url):
    with pytest.raises(InvalidRequest):
        decode_data_url(url)


@pytest.mark.parametrize(
    ("size", "slack", "crop"),
    [((48, 80), 16, False), ((48, 80), 8, True), ((80, 48), 16, True)],
)
def test_an_image_is_brought_to_the_size_of_its_video_as_diffusers_does(size, slack, crop):
    source, (height, width) = picture(123, 91), size
    ours = Image.open(io.BytesIO(read_image(encode_as(source), size=size, slack=slack)))
    processor = VaeImageProcessor(vae_scale_factor=8)
    theirs = processor.resize(source, height, width, resize_mode="crop" if crop else "default")
    assert ours.tobytes() == theirs.tobytes()
    assert processor.resize(ours, height, width, resize_mode="crop").tobytes() == ours.tobytes()  # once is enough


def form(*parts, end="--x--\r\n"):
    """Return a form. Each part has a name, further headers, and the content."""
    lines = b"".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
        for name, more, content in parts
    )
    return lines + end.encode()


NAMED = '; filename="a.png"'
FILE = ("input_reference", NAMED, encode_as(picture()))
FORM_X = f"{FORM}; boundary=x"


BODIES = {  # Made when they are sent, since they have a hundred megabytes in total.
    "a form cut off in its image": lambda: (FORM_X, form(FILE)[:-900]),
    "a form of many fields": lambda: (FORM_X, form(*[("a", "", b"x")] * 1000)),
    "a form of another boundary": lambda: (FORM_X, form(FILE).replace(b"--x", b"--y")),
    "a form of line ends": lambda: (FORM_X, form(("a", "", b"\r\n--" * 1_000_000))),
    "two images": lambda: (FORM_X, form(FILE, FILE)),
    "JSON of many fields inside": lambda: (
        JSON,
        json.dumps({"input_reference": {f"k{i}": 0 for i in range(9999)}}).encode(),
    ),
    "JSON of lists": lambda: (JSON, b"[" + b"[]," * 3_000_000 + b"0]"),
    "deep JSON": lambda: (JSON, b"[" * 1_000_000),
    "JSON of a long number": lambda: (JSON, b'{"seed": ' + b"9" * 1_000_000 + b"}"),
    "a data URL of options": lambda: (
        JSON,
        json.dumps({"input_reference": {"image_url": "data:" + ";" * 2_000_000}}).encode(),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies_are_refused_within_seconds_and_bounds(name):
    content_type, body = BODIES[name]()
    start = time.monotonic()
    with pytest.raises(InvalidRequest) as refused:
        read(content_type, body, ServiceLimits(reader_bytes=400_000_000))
    assert len(str(refused.value)) < 400 and len(str(refused.value).splitlines()) == 1
    assert time.monotonic() - start < 20
