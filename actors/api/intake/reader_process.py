"""The process that parses one untrusted body or image, and can reach nothing else.

python -m actors.api.intake.reader_process FILE_DESCRIPTOR CPU_SECONDS MEMORY_BYTES

stdin   a line with the content type of the file
stdout  a line with the fields, and the digests and sizes of the images
stdin   a line {"name": ..., "height": ..., "width": ..., "slack": ...} for each image that is wanted
stdout  its length in eight bytes, and the image, upright and of that size, as a PNG that this program has encoded
        itself, without any metadata

It exits with 0, or with REFUSED and a reason for people on stderr.
"""

import hashlib
import io
import json
import os
import resource
import sys
from typing import TYPE_CHECKING

from actors.api.intake.body_parts import split_body
from actors.api.intake.references import IMAGE
from wan_tpu.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

REFUSED = 3
LENGTH = 8  # Bytes of the number before an image.
_NICE = 5  # Lower priority than the processes that answer HTTP.


def main() -> int:
    """Serve one file, within limits that the operating system enforces."""
    file, cpu_s, memory = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # It writes no files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    try:
        _serve(file)
    except InvalidRequest as error:
        print(json.dumps([str(error), error.field]), file=sys.stderr)
        return REFUSED
    except MemoryError:
        print(json.dumps(["it takes more memory to read than it gets; send it smaller", None]), file=sys.stderr)
        return REFUSED
    return 0


def _serve(descriptor: int) -> None:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    with open(descriptor, "rb") as file:
        parts = split_body(json.loads(stdin.readline()), file.read())
    images = {name: open_image(content, name) for name, content in parts.uploads.items()}
    answer = {
        "text": parts.text,
        "uploads": {name: hashlib.sha256(content).hexdigest() for name, content in parts.uploads.items()},
        "sizes": {name: [image.height, image.width] for name, image in images.items()},
    }
    stdout.write(json.dumps(answer).encode() + b"\n")
    stdout.flush()
    while images and (line := stdin.readline()):
        from wan_tpu.media.image import fit_image  # Imported within the limits.

        wanted = json.loads(line)
        content = encode_png(fit_image(images.pop(wanted.pop("name")), **wanted))
        stdout.write(len(content).to_bytes(LENGTH, "big") + content)
        stdout.flush()


def open_image(content: bytes, name: str = IMAGE) -> "Image.Image":
    """Return an image, upright and in RGB; raises `InvalidRequest` with the name of its field."""
    from PIL import AvifImagePlugin

    from wan_tpu.media.image import KINDS, decode_image  # Imported within the limits.

    # The default is a thread for each core, whose stacks alone would exceed the memory limit.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1

    if not content:
        raise InvalidRequest(f"the image is empty; send a {KINDS} file", name)
    try:
        image = decode_image(io.BytesIO(content), "upload")
    except InvalidRequest as error:
        raise InvalidRequest(str(error), name) from None
    except MemoryError:
        raise
    except Exception as error:  # Decoders raise all kinds of exceptions on broken files.
        kind = type(error).__name__
        raise InvalidRequest(f"image upload is damaged ({kind}); save it again as PNG or JPEG", name) from None
    image.info.clear()  # Drops what the file says about its author, its location and its colours.
    return image


def encode_png(image: "Image.Image") -> bytes:
    """Return an image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
