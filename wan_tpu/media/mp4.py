"""An mp4 that one host of a slice encodes while all of its hosts decode."""

import contextlib
from collections.abc import Callable
from types import TracebackType

import numpy as np

from wan_tpu.errors import OutputError
from wan_tpu.media.encoding import LEAD
from wan_tpu.media.packets import PACKET, count_packets
from wan_tpu.media.temporary import open_folder
from wan_tpu.media.video import VideoWriter
from wan_tpu.tail import find_sample


def cut_sound(
    audio: np.ndarray, rate: int, fps: float, *, hidden: int, origin: int | None = None
) -> tuple[np.ndarray, int, bool]:
    """Return the arguments of `VideoWriter.set_audio` for a video of which the first `hidden` frames aren't written.

    Args:
        audio: The whole sound, [channels, samples].
        rate: Samples per second.
        fps: Frames per second.
        hidden: How many frames aren't written.
        origin: As `Mp4` takes `sound_origin`.
    """
    if origin is None:
        return audio[:, find_sample(hidden, rate, fps) :], rate, False
    first = PACKET * (count_packets(origin + hidden, rate, fps) - LEAD) - find_sample(origin, rate, fps)
    # Few hidden frames may be shorter than what leads to the others: silence comes before it.
    return np.pad(audio, ((0, 0), (max(0, -first), 0)))[:, max(0, first) :], rate, True


class Mp4:
    """Encodes frames as they arrive. It is a context manager, which deletes the temporary file at its end.

    Attributes:
        failure: The error that stopped it. It is kept, not raised, because the host that writes must go on decoding
            with the others.
        content: The whole file, after `finish`.
    """

    def __init__(
        self,
        fps: float,
        on_fragment: Callable[[bytes], object] | None = None,
        *,
        hidden_frames: int = 0,
        written_frames: int | None = None,
        sound_origin: int | None = None,
    ) -> None:
        """Begin an mp4.

        Args:
            fps: Frames per second.
            on_fragment: Called with fragments of it, as `VideoWriter` does.
            hidden_frames: How many frames at the beginning aren't written, nor their sound.
            written_frames: How many of the following ones are written; None for all. The sound lasts a packet longer,
                so that what follows can begin within it.
            sound_origin: Where its first frame, hidden or not, is in a video of several parts, if its sound goes on
                from that of the part before: it is then encoded so that the join isn't heard (`ContinuedVideo`).
        """
        self.failure: OutputError | OSError | None = None
        self.content = b""
        self._fps, self._on_fragment = fps, on_fragment
        self._hidden_frames, self._written_frames, self._sound_origin = hidden_frames, written_frames, sound_origin
        self._folder = contextlib.ExitStack()
        self._audio: tuple[np.ndarray, int, bool] | None = None
        self._last: np.ndarray | None = None
        self._writer: VideoWriter | None = None

    def __enter__(self) -> "Mp4":
        return self

    @property
    def last_frame(self) -> np.ndarray | None:
        """The latest frame, uint8 [H, W, 3]; None before the first."""
        return None if self._last is None else np.ascontiguousarray(self._last[[2, 0, 1]].transpose(1, 2, 0))

    def set_audio(self, audio: np.ndarray, rate: int) -> None:
        """Set the sound of the whole video before its first frame, as `VideoWriter.set_audio`."""
        first, last = self._hidden_frames, None
        if self._written_frames is not None:
            last = find_sample(first + self._written_frames, rate, self._fps) + PACKET
        self._audio = cut_sound(audio[:, :last], rate, self._fps, hidden=first, origin=self._sound_origin)

    def add(self, planes: np.ndarray) -> None:
        """Append frames, uint8 [T, 3, H, W]: green, blue, red (`wan_tpu.stages.vae.to_planes`)."""
        hidden, self._hidden_frames = self._hidden_frames, max(0, self._hidden_frames - len(planes))
        planes = planes[hidden:]
        if self._written_frames is not None:
            planes = planes[: self._written_frames]
            self._written_frames -= len(planes)
        if self.failure is not None or not len(planes):
            return
        try:
            if self._writer is None:
                # An encoder seeks back in an mp4 to complete it, so it needs a file.
                path = self._folder.enter_context(open_folder()) / "video.mp4"
                self._writer = VideoWriter(path, fps=self._fps, planes=True, on_fragment=self._on_fragment)
                if self._audio is not None:
                    self._writer.set_audio(*self._audio)
            self._writer.write(planes)
            self._last = planes[-1]
        except (OSError, OutputError) as error:
            self.failure = error

    def finish(self) -> None:
        """End the file and read it into `content`."""
        if self.failure is not None or self._writer is None:
            return
        try:
            writer, self._writer = self._writer, None
            writer.__exit__(None, None, None)
            self.content = writer.path.read_bytes()
        except (OSError, OutputError) as error:
            self.failure = error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A writer that wasn't finished, for whatever reason, leaves no file.
        if self._writer is not None:
            self._writer.__exit__(kind or OutputError, error, trace)
        self._folder.close()
