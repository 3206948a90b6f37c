"""The process that decodes one image of a stranger: stdin -> an RGB PNG on stdout, and nothing else it could reach.

python -m actors.api.images.decoder_process. Ends with 0, or with REFUSED and the reason for people on stderr.
"""

import io
import resource
import sys

from wan_tpu.errors import InvalidRequest

REFUSED = 3
FORMATS = ("PNG", "JPEG", "WEBP")  # what OpenAI's API takes, and few decoders for a stranger to try
# 64 megapixels are 192 MB of RGB; turning it upright and converting it hold two or three of them, Python some more.
MEMORY_BYTES = 1_500_000_000
CPU_S = 30


def main() -> int:
    """Decode, within limits that the system holds."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes no file
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    content = sys.stdin.buffer.read()
    try:
        made = clean(content)
    except InvalidRequest as error:
        print(error, file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write(made)
    return 0


def clean(content: bytes) -> bytes:
    """Return an image as an upright RGB PNG without metadata; raises `InvalidRequest`."""
    from wan_tpu.media.image import decode_image  # within the limits

    made = io.BytesIO()
    try:
        image = decode_image(io.BytesIO(content), "upload", FORMATS)
        image.info.clear()  # what the file says about its maker, its location and its colours ends here
        image.save(made, "PNG", compress_level=1)
    except InvalidRequest:
        raise
    except Exception as error:  # decoders raise all kinds of things on broken files
        raise InvalidRequest(
            f"image upload is damaged ({type(error).__name__}); save it again as PNG or JPEG"
        ) from None
    return made.getvalue()


if __name__ == "__main__":
    sys.exit(main())
