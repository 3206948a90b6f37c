"""ffmpeg in a simulated world: a video is a row of fragments of four bytes, and takes time to cut and to join."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.api.worker import fragments, making, segments
from tests.actors.simulation.virtual_time import VirtualTime
from wan_tpu.errors import Unavailable
from wan_tpu.media.continued import NotContinued

SIZE = 4  # Bytes of a fragment.
UNLIKE = b"\xff"  # What the fragments of a part begin with that can't follow others.


class Media:
    """ffmpeg on all machines of a world.

    Attributes:
        fails: Whether it is killed, as on machines without memory.
        refusals: When a part could not follow the others.
    """

    def __init__(self, loop: VirtualTime) -> None:
        self.loop, self.fails = loop, False
        self.refusals: list[float] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have workers use this."""
        patch.setattr(segments, "join_videos", self.join)
        patch.setattr(making, "read_last_frame", self.read_last_frame)
        patch.setattr(fragments, "ContinuedVideo", lambda *_: Continued(self))

    def run(self, seconds: float) -> None:
        """Take time, and fail if ffmpeg does."""
        self.loop.block(seconds)
        if self.fails:
            raise Unavailable("ffmpeg was ended by signal 9")

    def join(self, parts: Sequence[Path], output: Path, **_: Any) -> None:
        self.run(0.3)
        output.write_bytes(b"".join(part.read_bytes() for part in parts))

    def read_last_frame(self, video: Path, _frames: int) -> bytes:
        self.run(0.1)
        return encode_picture(video.read_bytes()[-SIZE:])


class Continued:
    """The stand-in for `ContinuedVideo`, whose fragments are passed on as they are."""

    def __init__(self, media: Media) -> None:
        self._media, self._is_first = media, True

    def add_part(self, path: Path) -> Generator[bytes, None, None]:
        self._media.run(0.05)
        yield from map(self.append, split(path.read_bytes()))
        self.end_part()

    def append(self, fragment: bytes) -> bytes:
        if not self._is_first and fragment.startswith(UNLIKE):
            self._media.refusals.append(self._media.loop.time())
            raise NotContinued("what continues the video is encoded with other settings")
        return fragment

    def end_part(self) -> None:
        self._is_first = False


def split(video: bytes) -> list[bytes]:
    """Return the fragments of a video."""
    return [video[start : start + SIZE] for start in range(0, len(video), SIZE)]


def encode_picture(end: bytes) -> bytes:
    """Return a picture of one pixel that stands for a frame: a PPM, which is quick to write and to read."""
    return b"P6 1 1 255\n" + end[-3:]
