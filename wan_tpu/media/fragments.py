"""Cut a video's fragmented mp4 into fragments while ffmpeg writes it.

A player can start with the first fragments, long before the last frame exists. Fragments need no keyframes of their
own, so frames are encoded exactly as they would be without fragments.
"""

import os
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from wan_tpu.media.boxes import HEADER
from wan_tpu.media.encoding import exact_rate

# Chromium starts to play after two fragments, but waited 11 s when every frame was a fragment.
FRAGMENT_FRAMES = 16
# The header is written with the first fragment, when the encoder's delay is known; otherwise the first frame would be
# late by that delay. The index at the end is left out, because only a complete file would have it.
_MOVFLAGS = "+delay_moov+default_base_moof+skip_trailer"
_READ_BYTES = 2**16


class FragmentPipe:
    """A pipe through which ffmpeg writes a fragmented mp4 beside the usual file.

    A thread reads it, so that ffmpeg never waits for the consumer of the fragments.
    """

    def __init__(self, on_fragment: Callable[[bytes], object]) -> None:
        """Open the pipe.

        Args:
            on_fragment: Called from the thread with each fragment, in order. It must neither raise nor wait.
        """
        self._on_fragment = on_fragment
        self._read_end, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._read, name="fragments", daemon=True)

    def build_target(self, path: Path, fps: float, *, audio: bool) -> list[str]:
        """Return ffmpeg's options for both outputs: frames and sound are encoded once.

        Args:
            path: Where the usual file is written.
            fps: Frames per second.
            audio: Whether there is a second input with sound.
        """
        name = "".join(f"\\{character}" if character in "\\'|" else character for character in str(path))
        target = f"[f=mp4:movflags={_MOVFLAGS}:frag_duration={find_length_us(fps)}]pipe:{self.descriptor}"
        streams = ["-map", "0:v", *(["-map", "1:a"] if audio else [])]
        return [*streams, "-flags", "+global_header", "-f", "tee", f"[f=mp4:movflags=+faststart]{name}|{target}"]

    def start(self) -> None:
        """Start reading. By now ffmpeg has the other end, or couldn't be started."""
        os.close(self.descriptor)
        self._thread.start()

    def join(self) -> None:
        """Wait, after ffmpeg has ended, until the last fragment has been passed on."""
        self._thread.join()

    def _read(self) -> None:
        splitter = FragmentSplitter()
        with os.fdopen(self._read_end, "rb", buffering=0) as stream:
            while data := stream.read(_READ_BYTES):
                for fragment in splitter.add(data):
                    self._on_fragment(fragment)


class FragmentSplitter:
    """Cuts the bytes of a fragmented mp4 where a fragment ends; the first one includes the header."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._box = 0  # Where the first incomplete box begins.

    def add(self, data: bytes) -> list[bytes]:
        """Return the fragments that the next bytes complete."""
        self._bytes += data
        complete: list[bytes] = []
        while len(self._bytes) >= self._box + HEADER.size:
            size, kind = HEADER.unpack_from(self._bytes, self._box)
            if len(self._bytes) < self._box + size:
                break
            self._box += size
            if kind == b"mdat":
                complete.append(bytes(self._bytes[: self._box]))
                del self._bytes[: self._box]
                self._box = 0
        return complete


def find_length_us(fps: float | Fraction) -> int:
    """Return how long a fragment lasts, in microseconds.

    It is half a frame shorter, so that no rounding moves the cut past the next frame.
    """
    rate = fps if isinstance(fps, Fraction) else exact_rate(fps)
    return int((FRAGMENT_FRAMES - Fraction(1, 2)) / rate * 10**6)
