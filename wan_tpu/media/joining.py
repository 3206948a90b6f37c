"""Join a video with the clips that continue it."""

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wan_tpu.errors import InvalidRequest, OutputError, Unavailable
from wan_tpu.media.continued import ContinuedVideo, NotContinued
from wan_tpu.media.encoding import AAC, exact_rate
from wan_tpu.media.ffmpeg import run_ffmpeg
from wan_tpu.media.reading import open_video
from wan_tpu.media.shown import Fit, mix_sound
from wan_tpu.media.temporary import open_folder
from wan_tpu.media.video import VideoWriter, check_ffmpeg

# Joining copies packets and encodes little besides the sound: it takes this long only if a disk or a machine hangs.
_TIMEOUT_S = 600.0
_CONVERSION_S = 6 * 3600.0  # Longer than any video takes that people continue.
_TRIAL_FRAMES = 3  # A single frame is encoded in another way.
_LEAST_ROOM = 2**20  # Bytes. Less remains only when ffmpeg has filled a disk.
_FACT = re.compile(r"#(\w+) (\d+)[:,]\s*(.+)")
_FLAGS = re.compile(r", F=0x([0-9A-F]+)")
_HIDDEN = 0x4  # The flag of a packet that an edit list hides.


class Sound(NamedTuple):
    """A format of sound: the codec, samples per second, and the channels."""

    codec: str
    rate: int
    layout: str


@dataclass(frozen=True)
class Clip:
    """A video file, as its packets describe it.

    Attributes:
        path: The file.
        settings: Codec, size and everything else that must be equal in two files whose packets are to form one stream.
        rate: Frames per second; the average of a file whose rate varies.
        is_even: Whether its packets are exactly the frames that are shown, neither turned nor stretched, and follow
            each other at exactly that rate from the start of the file.
        frames: How many frames it has.
        sound: The format of its sound, if it has any.
    """

    path: Path
    settings: tuple[tuple[str, str], ...]
    rate: Fraction
    is_even: bool
    frames: int
    sound: Sound | None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        width, height = dict(self.settings)["dimensions"].split("x")
        return int(width), int(height)


def read_clip(path: Path) -> Clip:
    """Return the description of a video file; raises `InvalidRequest`, `OutputError`, `Unavailable`."""
    streams = ["-map", "0:V:0", "-map", "0:a:0?", "-c", "copy", "-f", "framecrc", "-"]
    text, described = _run(["-v", "info", "-nostats", "-i", _place(path), *streams], path)
    facts: dict[str, dict[str, str]] = {"0": {}, "1": {}}
    frames: list[tuple[int, int]] = []  # The start and the duration of each frame.
    hides = False
    for line in text.decode().splitlines():
        if (fact := _FACT.match(line)) is not None:
            facts[fact[2]][fact[1]] = fact[3]
        elif line.startswith("0,"):
            _, _, timestamp, duration, *_ = line.split(",")
            frames.append((int(timestamp), int(duration)))
            flags = _FLAGS.search(line)
            hides = hides or (flags is not None and bool(int(flags[1], 16) & _HIDDEN))
    frames.sort()
    times = [timestamp for timestamp, _ in frames]
    # A single frame has only its duration to tell the rate.
    span, steps = (times[-1] - times[0], len(times) - 1) if len(times) > 1 else (frames[0][1] if frames else 0, 1)
    if span <= 0:
        raise InvalidRequest(f"video {path} has no frames that last; save it again as an mp4", "video")
    video, sound = facts["0"], facts["1"]
    is_even = (
        not hides
        and span % steps == 0
        and times == [index * (span // steps) for index in range(len(times))]
        and video.get("sar", "1/1") in ("0/1", "1/1")
        and b"displaymatrix:" not in described.lower().replace(b" ", b"")
    )
    tick = Fraction(video["tb"])
    rate = Fraction(steps, span) / tick
    sound_format = None
    if "channel_layout_name" in sound:
        sound_format = Sound(sound["codec_id"], int(sound["sample_rate"]), sound["channel_layout_name"])
    return Clip(path, tuple(sorted(video.items())), rate, is_even, len(times), sound_format)


def join_videos(clips: Sequence[Path], output: Path, *, cancelled: threading.Event | None = None) -> None:
    """Write a video that shows files one after another, in the size and at the rate of the last one.

    Packets are copied from files that are encoded as the last one is; other files are converted first. So nothing is
    lost when a video is continued again and again. The sound of a file begins with the packet nearest to its first
    frame, lasts as long as its frames, and is silence if the file has none and another has some. A file whose frames
    begin after its sound shows the first one from the beginning.

    Args:
        clips: The files, in the order in which they are shown.
        output: The mp4, which appears once it is complete. A file there is replaced.
        cancelled: Another thread may set this to make the call fail soon.

    Raises:
        InvalidRequest: A file can't be read as a video.
        OutputError: The result can't be written.
        Unavailable: The machine fails.
    """
    check_ffmpeg()
    with _open_folder(output.absolute().parent) as folder:
        files = _make_alike(clips, folder, cancelled)
        fragments, partial = folder / "fragments.mp4", folder / "joined.mp4"
        try:
            _write_fragments(*_make_sound_alike(files, folder, cancelled), fragments, cancelled)
        except NotContinued:  # Some other program has put sound beside our frames.
            every = _make_sound_alike(files, folder, cancelled, every=True)
            try:
                _write_fragments(*every, fragments, cancelled)
            except NotContinued as error:
                raise OutputError(f"{output} can't be joined ({error}); check IMAGEIO_FFMPEG_EXE") from None
        copied = ["-map", "0", "-c", "copy", "-movflags", "+faststart"]
        _run(["-i", _place(fragments), *copied, _place(partial)], output, cancelled=cancelled)
        os.replace(partial, output)


def _write_fragments(files: Sequence[Clip], rate: int | None, output: Path, cancelled: threading.Event | None) -> None:
    """Write files one after another as the fragments of one; `rate` is that of their sound."""
    whole = ContinuedVideo(files[-1].rate, rate)
    with output.open("wb") as file:
        for clip in files:
            for fragment in whole.add_part(clip.path):
                file.write(fragment)
                if cancelled is not None and cancelled.is_set():
                    raise Unavailable(f"{output} isn't wanted any more")
        file.write(whole.finish())


def prepare_source(video: Path, folder: Path, fit: Fit, fps: float) -> Path:
    """Return a video that what is generated at a size and a rate can continue: the video itself, or a converted one.

    Both are joined with a few frames for a trial, so whatever would prevent that later is found before anything is
    computed.

    Args:
        video: The video.
        folder: A folder for what is written.
        fit: The size of what will continue the video.
        fps: Frames per second, likewise.

    Raises:
        InvalidRequest: It can't be read as a video.
        OutputError: There is too little room for a video that includes this one.
        Unavailable: The machine fails.
    """
    trial, joined, converted = folder / "trial.mp4", folder / "joined.mp4", folder / "source.mp4"
    with VideoWriter(trial, fps=fps) as writer:
        writer.write(np.zeros((_TRIAL_FRAMES, fit.height, fit.width, 3), np.uint8))
    if not _are_alike([read_clip(video), read_clip(trial)]):
        with _explain_disk(folder):
            _convert(video, converted, fit, exact_rate(fps))
        video = converted
    with _explain_disk(folder):
        join_videos([video, trial], joined)
    trial.unlink()
    joined.unlink()
    return video


def _make_alike(videos: Sequence[Path], folder: Path, cancelled: threading.Event | None) -> list[Clip]:
    """Return files of the same settings, those of the last one if that is one of ours: the given or converted ones."""
    files = [read_clip(path) for path in videos]
    last = files[-1]
    if _are_alike(files):
        return files
    width, height = (side // 2 * 2 for side in last.size)
    for others in (True, False):  # If the last one isn't one of ours, all are converted.
        for index, clip in enumerate(files):
            if not (others and _are_alike([clip, last])):
                path = folder / f"{index}.mp4"
                with _explain_disk(folder):
                    _convert(videos[index], path, Fit(height, width), last.rate, cancelled)
                files[index] = read_clip(path)
        if _are_alike(files):
            return files
    raise OutputError(f"{videos[-1]} can't be joined with what precedes it; check IMAGEIO_FFMPEG_EXE")


def _are_alike(files: Sequence[Clip]) -> bool:
    """Return whether the packets of files can form one stream."""
    last = files[-1]
    return all(clip.is_even and (clip.settings, clip.rate) == (last.settings, last.rate) for clip in files)


def _convert(video: Path, output: Path, fit: Fit, rate: Fraction, cancelled: threading.Event | None = None) -> None:
    """Write what a video shows and its sound as this program encodes them."""
    with open_video(video, timeout_s=_CONVERSION_S, cancelled=cancelled) as shown:
        shown.encode(fit, rate, ["-movflags", "+faststart", "-f", "mp4", _place(output)], sound=True)


@contextlib.contextmanager
def _explain_disk(folder: Path) -> Iterator[None]:
    """Raise `OutputError` instead of another error if there is no room any more."""
    try:
        yield
    except (InvalidRequest, Unavailable):
        if shutil.disk_usage(folder).free > _LEAST_ROOM:
            raise
        raise OutputError(f"there is too little room in {folder.parent}; make room there") from None


def _make_sound_alike(
    files: Sequence[Clip], folder: Path, cancelled: threading.Event | None, *, every: bool = False
) -> tuple[list[Clip], int | None]:
    """Return files whose sound has one format, the given or converted ones, and its samples per second."""
    sounds = [clip.sound for clip in files if clip.sound is not None]
    if not sounds:
        return list(files), None
    # What is silent at its beginning is stereo.
    layout = "mono" if files[0].sound is not None and all(sound.layout == "mono" for sound in sounds) else "stereo"
    wanted, alike = Sound("aac", sounds[-1].rate, layout), []
    for index, clip in enumerate(files):
        if clip.sound is None or (clip.sound == wanted and not every):
            alike.append(clip)
            continue
        path, mixed = folder / f"{index}.sound.mp4", mix_sound(clip.sound.layout, layout)
        target = ["-af", ",".join([*mixed, f"aresample={wanted.rate}:async=1:first_pts=0"]), *AAC.split(), _place(path)]
        with _explain_disk(folder):
            streams = ["-map", "0:V:0", "-map", "0:a:0", "-c:v", "copy"]
            _run(["-i", _place(clip.path), *streams, *target], clip.path, cancelled=cancelled)
        alike.append(read_clip(path))
    return alike, wanted.rate


@contextlib.contextmanager
def _open_folder(parent: Path) -> Iterator[Path]:
    """Open a folder for temporary files; raises `OutputError`, also within the block, if the disk can't hold them."""
    try:
        with open_folder(parent) as folder:
            yield folder
    except OSError as error:
        raise OutputError(f"can't write in {parent} ({error.strerror or error}); make room there") from None


def _place(path: Path) -> str:
    """Return a path that ffmpeg can use: it reads a colon in a relative path as a protocol."""
    return str(path.absolute())


def _run(arguments: Sequence[str], path: Path, *, cancelled: threading.Event | None = None) -> tuple[bytes, bytes]:
    """Run ffmpeg, and return its output and messages; errors name the file `path`."""
    command = ["-y", "-v", "error", *arguments]
    try:
        done = run_ffmpeg(command, timeout_s=_TIMEOUT_S, cancelled=cancelled)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"ffmpeg doesn't finish {path} within {_TIMEOUT_S:g} s; check this machine") from None
    except OSError as error:
        raise Unavailable(f"ffmpeg can't be started ({error.strerror}); make room on this machine") from None
    if done.returncode < 0:
        raise Unavailable(f"ffmpeg was ended by signal {-done.returncode} at {path}; check this machine's memory")
    if done.returncode:
        message = (done.stderr.decode(errors="replace").strip().splitlines() or ["it has no frames"])[-1]
        if arguments[-1] == "-":
            raise InvalidRequest(
                f"video {path} can't be read ({message[:200]}); give an mp4, or what else ffmpeg reads", "video"
            )
        raise OutputError(f"{path} can't be joined ({message[:200]}); check the disk")
    return done.stdout, done.stderr
