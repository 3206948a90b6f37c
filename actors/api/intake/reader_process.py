"""The process that takes one body or image of a stranger apart, and has nothing else that it could reach.

python -m actors.api.intake.reader_process FILE_DESCRIPTOR CPU_SECONDS MEMORY_BYTES

stdin   a line: the type of what is in the file
stdout  a line: what that is, and the sizes of its images
stdin   a line {"name": ..., "height": ..., "width": ..., "slack": ...} for each image that is wanted
stdout  eight bytes that say how long it is, and the image, upright, of that size, as a PNG that this program has
        written itself, without any metadata

Ends with 0, or with REFUSED and the reason for people on stderr.
"""

import hashlib
import io
import json
import os
import resource
import sys
from typing import TYPE_CHECKING

from actors.api.intake.apart import apart
from actors.api.intake.references import IMAGE
from wan_tpu.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL import Image

REFUSED = 3
LENGTH = 8  # bytes of the number before an image
_NICE = 5  # behind what answers


def main() -> int:
    """Do it, within limits that the system holds."""
    file, cpu_s, memory = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes no file
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
    given, said = sys.stdin.buffer, sys.stdout.buffer
    with open(descriptor, "rb") as file:
        parts = apart(json.loads(given.readline()), file.read())
    images = {name: opened(content, name) for name, content in parts.uploads.items()}
    told = {
        "text": parts.text,
        "uploads": {name: hashlib.sha256(content).hexdigest() for name, content in parts.uploads.items()},
        "sizes": {name: [image.height, image.width] for name, image in images.items()},
    }
    said.write(json.dumps(told).encode() + b"\n")
    said.flush()
    while images and (line := given.readline()):
        from wan_tpu.media.image import fit_image  # within the limits

        wanted = json.loads(line)
        content = png(fit_image(images.pop(wanted.pop("name")), **wanted))
        said.write(len(content).to_bytes(LENGTH, "big") + content)
        said.flush()


def opened(content: bytes, name: str = IMAGE) -> "Image.Image":
    """Return an image, upright and in RGB; raises `InvalidRequest` with the name of its field."""
    from PIL import AvifImagePlugin

    from wan_tpu.media.image import KINDS, decode_image  # within the limits

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # Of as many as there are cores, the stacks alone would pass the limit.

    if not content:
        raise InvalidRequest(f"the image is empty; send a {KINDS} file", name)
    try:
        image = decode_image(io.BytesIO(content), "upload")
    except InvalidRequest as error:
        raise InvalidRequest(str(error), name) from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise all kinds of things on broken files
        kind = type(error).__name__
        raise InvalidRequest(f"image upload is damaged ({kind}); save it again as PNG or JPEG", name) from None
    image.info.clear()  # what the file says about its maker, its location and its colours ends here
    return image


def png(image: "Image.Image") -> bytes:
    """Return an image as a file."""
    made = io.BytesIO()
    image.save(made, "PNG", compress_level=1)
    return made.getvalue()


if __name__ == "__main__":
    sys.exit(main())
