"""Images that strangers send: a limited number of bytes, decoded in a limited process, kept as a plain RGB PNG."""

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import os
import re
import struct
import sys
from urllib.parse import unquote_to_bytes

from actors.api.images.decoder_process import REFUSED
from wan_tpu.errors import InvalidRequest

_DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.ASCII)
_CHILD = "actors.api.images.decoder_process"
_PROCESSES = 2  # that decode at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """How much is taken.

    max_bytes   of a file as it was sent
    timeout_s   for decoding it
    """

    max_bytes: int = 20_000_000
    timeout_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CleanImage:
    """An RGB PNG that this program has written itself, without any metadata; its size in pixels."""

    png: bytes
    width: int
    height: int


def data_url_content(url: str, limits: ImageLimits) -> bytes:
    """Return the content of a data: URL (RFC 2397); raises `InvalidRequest`."""
    head = _DATA_URL.match(url)
    if head is None:
        raise InvalidRequest("the image is no data URL; give one such as data:image/png;base64,iVBORw0...")
    kind, options = head.group(1).strip().lower(), head.group(2).lower()
    if kind and not kind.startswith("image/"):
        raise InvalidRequest(f"the data URL is of type {kind[:40]!r}; give an image, such as image/png")
    encoded = url[head.end() :]
    if len(encoded) > limits.max_bytes * 4:  # longer than any encoding of what is taken
        raise _too_large(limits)
    try:
        content = unquote_to_bytes(encoded)
        return base64.b64decode(content, validate=True) if options.endswith(";base64") else content
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequest("the data URL is no valid base64; encode the file again") from None


class ImageDecoder:
    """Decodes images, each in a process of its own that has little memory, little time and no secrets."""

    def __init__(self, limits: ImageLimits = ImageLimits()) -> None:
        self.limits = limits
        self._places = asyncio.Semaphore(_PROCESSES)

    async def decode(self, content: bytes) -> CleanImage:
        """Return an image upright and in RGB; raises `InvalidRequest` when it is none, damaged or too large."""
        if not content:
            raise InvalidRequest("the image is empty; send a PNG, JPEG or WebP file")
        if len(content) > self.limits.max_bytes:
            raise _too_large(self.limits)
        async with self._places:
            code, png, said = await self._run(content)
        if code == REFUSED:
            raise InvalidRequest(said.decode(errors="replace").strip())
        if code != 0:
            raise InvalidRequest("the image needs more memory or time to decode than it gets; save it again, smaller")
        width, height = struct.unpack(">II", png[16:24])  # of the PNG's first chunk, which the child wrote
        return CleanImage(png=png, width=width, height=height)

    async def _run(self, content: bytes) -> tuple[int, bytes, bytes]:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _CHILD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path), "PATH": os.defpath},
        )
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                png, said = await child.communicate(content)
        except TimeoutError:
            return -1, b"", b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()  # also when the client has gone away meanwhile
            await child.wait()
        return child.returncode or 0, png, said


def _too_large(limits: ImageLimits) -> InvalidRequest:
    return InvalidRequest(
        f"the image has more than {limits.max_bytes} bytes, which is all that is taken; shrink it first"
    )
