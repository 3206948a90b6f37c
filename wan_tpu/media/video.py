"""Write the results that people look at, an mp4 and a contact sheet, each completely or not at all."""

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import imageio_ffmpeg
import numpy as np
from PIL import Image

from wan_tpu.errors import OutputError
from wan_tpu.media.encoding import AAC, COLOURS, H264, WITHOUT_LEAD, exact_rate
from wan_tpu.media.fragments import FragmentPipe
from wan_tpu.media.sheet import contact_sheet, fill_rows, frame_label

CONTACT_SHEET_FRAMES = 12
_PIPE_BYTES = 2**20  # Bytes that may wait for ffmpeg. A frame of 720p would fill the usual 64 KiB forty times.


def check_ffmpeg() -> None:
    """Raise `OutputError` when there is no ffmpeg to write H.264 with."""
    try:
        path = shutil.which(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError:
        path = None
    if path is None:
        raise OutputError("ffmpeg is missing: run `pip install imageio-ffmpeg`, or set IMAGEIO_FFMPEG_EXE to its path")


def check_output(path: str | Path, *, overwrite: bool, inputs: Iterable[str | Path | None] = ()) -> Path:
    """Return `path` if a file can be written there; create its folder when it is missing.

    Args:
        path: Where the file is to be written.
        overwrite: Whether a file there may be replaced.
        inputs: Files and folders that are read. Neither they nor anything in such a folder is ever overwritten.

    Raises:
        OutputError: It is an input, the file exists and may not be replaced, or the folder can't be written to.
    """
    path = Path(path)
    try:
        if not path.name or path.is_dir():
            raise OutputError(f"{str(path)!r} is a folder; give the path of a file in it")
        for source in inputs:
            if source and _is_or_holds(source, path):
                raise OutputError(f"{path} would be written over {source}, which is an input; choose another path")
        if path.exists() and not overwrite:
            raise OutputError(f"{path} exists; choose another path, or ask for --overwrite (overwrite=True)")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.writable")
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"can't write {path} ({reason}); choose a folder that can be written to") from None
    return path


def check_folder(folder: Path, option: str) -> None:
    """Create a folder if it is missing; raises `OutputError`, naming the option, unless files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileExistsError:
        raise OutputError(f"{option} {folder} is a file; give a folder") from None
    except OSError as error:
        raise OutputError(f"{option} {folder} can't be written to ({error.strerror}); give another folder") from None


class VideoWriter:
    """Encodes frames as they arrive: H.264, yuv420p, BT.709, faststart, with AAC if there is sound.

    A context manager: the file appears at `path` when the block ends normally; an exception leaves nothing behind.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fps: float,
        overwrite: bool = False,
        planes: bool = False,
        on_fragment: Callable[[bytes], object] | None = None,
    ) -> None:
        """Check that the file can be written.

        Args:
            path: Where the mp4 will appear.
            fps: Frames per second.
            overwrite: Whether a file there may be replaced.
            planes: Frames are [3, H, W], green, blue and red, instead of [H, W, 3], red, green and blue.
            on_fragment: Called with the fragments of a second mp4 of the same frames and sound, as `FragmentPipe`. The
                file at `path` is the same with and without this.

        Raises:
            OutputError: As `check_output`; or there is no ffmpeg, or the path isn't that of an mp4.
        """
        check_ffmpeg()
        if Path(path).suffix.lower() != ".mp4":
            raise OutputError(f"{path} doesn't end in .mp4, which is what is written; give such a path")
        self.path = check_output(path, overwrite=overwrite)
        self._fps = fps
        self._overwrite = overwrite
        self._planes = planes
        # The path is absolute, because ffmpeg reads a colon in a relative path as a protocol.
        self._partial = self.path.absolute().with_name(f".{self.path.name}.partial.mp4")
        self._audio: tuple[np.ndarray, int, bool] | None = None
        self._on_fragment = on_fragment
        self._fragments: FragmentPipe | None = None
        self._ffmpeg: subprocess.Popen[bytes] | None = None

    def set_audio(self, audio: np.ndarray, rate: int, goes_on: bool = False) -> None:
        """Set the sound of the whole video, which ffmpeg has to know before the first frame.

        The sound may be shorter or longer than the frames: nothing is cut.

        Args:
            audio: Float32 [channels, samples] in [-1, 1].
            rate: Samples per second.
            goes_on: Whether the samples of `LEAD` packets come first that precede the video, so that what is heard
                before it in another file goes on without a gap. By itself, an encoder takes them for silence.

        Raises:
            ValueError: A frame has been written.
        """
        if self._ffmpeg is not None:
            raise ValueError("the sound was set after the first frame")
        self._audio = audio, rate, goes_on

    def write(self, frames: Iterable[np.ndarray]) -> None:
        """Append frames, uint8 [T, ...], all of one size; raises `OutputError` when ffmpeg gives up."""
        for frame in frames:
            if self._ffmpeg is None:
                # An interrupt here could leak a running process.
                with _defer_interrupt():
                    self._ffmpeg = self._start(*(frame.shape[1:] if self._planes else frame.shape[:2]))
            assert self._ffmpeg.stdin is not None
            try:
                self._ffmpeg.stdin.write(np.ascontiguousarray(frame, np.uint8).data)
            except BrokenPipeError:
                raise self._failure(self._ffmpeg) from None

    def _start(self, height: int, width: int) -> "subprocess.Popen[bytes]":
        pixels = "gbrp" if self._planes else "rgb24"
        video = f"-f rawvideo -pix_fmt {pixels} -s {width}x{height} -r {exact_rate(self._fps)} -i -".split()
        target = ["-vf", COLOURS, *H264.split()]
        if self._audio is None:
            return self._run(video, target)
        audio, rate, goes_on = self._audio
        # This is an unnamed file, not a second pipe, so that whichever input ffmpeg wants next, the other one never
        # blocks it.
        with tempfile.TemporaryFile() as samples:
            try:
                samples.write(np.ascontiguousarray(audio.T, "<f4").data)
                samples.seek(0)
            except OSError as error:
                reason = f"{error.strerror} in {tempfile.gettempdir()}"
                raise OutputError(f"can't write the sound of {self.path} ({reason}); make room there") from None
            sound = f"-f f32le -ar {rate} -ac {len(audio)} -i pipe:{samples.fileno()}".split()
            aac = [*AAC.split(), *(["-bsf:a", WITHOUT_LEAD] if goes_on else [])]
            return self._run([*video, *sound], [*target, *aac], descriptors=[samples.fileno()])

    def _run(self, sources: list[str], target: list[str], descriptors: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
        # imageio's writer isn't used: it starts ffmpeg through a Python fork, which is unsafe beside JAX's threads, and
        # loses track of ffmpeg on Ctrl-C. A separate session keeps Ctrl-C away from ffmpeg.
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", *sources, *target]
        output = ["-movflags", "+faststart", str(self._partial)]
        if self._on_fragment is not None:
            self._fragments = FragmentPipe(self._on_fragment)
            output = self._fragments.build_target(self._partial, self._fps, audio=self._audio is not None)
            descriptors = [*descriptors, self._fragments.descriptor]
        try:
            return subprocess.Popen(
                [*command, *output],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                pipesize=_PIPE_BYTES,
                start_new_session=True,
            )
        finally:
            if self._fragments is not None:
                self._fragments.start()

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._ffmpeg is None:
                raise OutputError(f"there is no frame to write to {self.path}")
            if kind is None and self._ffmpeg is not None:
                _, message = self._ffmpeg.communicate()
                if self._ffmpeg.returncode:
                    raise self._failure(self._ffmpeg, message)
                _publish(self._partial, self.path, overwrite=self._overwrite)
        finally:
            if self._ffmpeg is not None:
                self._ffmpeg.kill()
                self._ffmpeg.wait()
            if self._fragments is not None:
                self._fragments.join()
            self._partial.unlink(missing_ok=True)

    def _failure(self, ffmpeg: "subprocess.Popen[bytes]", message: bytes | None = None) -> OutputError:
        if message is None:
            assert ffmpeg.stderr is not None
            message = ffmpeg.stderr.read()
            ffmpeg.wait()
        lines = message.decode(errors="replace").strip().splitlines() or [f"exit code {ffmpeg.returncode}"]
        return OutputError(f"ffmpeg can't write {self.path} ({lines[-1]}); check the disk, and IMAGEIO_FFMPEG_EXE")


class ContactSheet:
    """Collects evenly spaced frames of a stream and draws them as one PNG, each with its number and time."""

    def __init__(self, total_frames: int, fps: float) -> None:
        self._indices = fill_rows(total_frames, CONTACT_SHEET_FRAMES)
        self._labels = [frame_label(index, fps) for index in self._indices]
        self._seen = 0
        self._frames: list[np.ndarray] = []

    def add(self, frames: np.ndarray) -> None:
        """Add the next frames, uint8 [T, H, W, 3], and keep those for the sheet."""
        for frame in frames:
            if self._seen in self._indices:
                self._frames.append(frame)
            self._seen += 1

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the sheet, 4 frames wide; raises `OutputError` as `check_output`."""
        path = check_output(path, overwrite=overwrite)
        sheet = contact_sheet([Image.fromarray(frame) for frame in self._frames], self._labels)
        partial = path.with_name(f".{path.name}.partial.png")
        try:
            sheet.save(partial)
            _publish(partial, path, overwrite=overwrite)
        except OSError as error:
            raise OutputError(f"can't write {path} ({error}); make room, or choose another folder") from None
        finally:
            partial.unlink(missing_ok=True)
        return path


def _is_or_holds(source: str | Path, path: Path) -> bool:
    """Return whether `source` is the file at `path`, through any links, or a folder that contains it."""
    # A hub id or a URL isn't a path.
    if not os.path.exists(source):
        return False
    return any(os.path.exists(place) and os.path.samefile(source, place) for place in (path, *path.resolve().parents))


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Hold back Ctrl-C until the block is done. Only the main thread ever gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if signals:
            signal.raise_signal(signal.SIGINT)


def _publish(partial: Path, path: Path, *, overwrite: bool) -> None:
    """Move a finished file into place; unless `overwrite`, refuse to replace a file that appeared meanwhile."""
    if path.exists() and not overwrite:
        raise OutputError(f"{path} appeared while it was being made; choose another path")
    os.replace(partial, path)
