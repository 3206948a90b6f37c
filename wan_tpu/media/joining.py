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

import numpy as np

from wan_tpu.errors import InvalidRequest, OutputError, Unavailable
from wan_tpu.media.encoding import AAC, exact_rate
from wan_tpu.media.ffmpeg import run_ffmpeg
from wan_tpu.media.reading import open_video
from wan_tpu.media.shown import Fit, mix_sound
from wan_tpu.media.temporary import open_folder
from wan_tpu.media.video import VideoWriter, check_ffmpeg

# Joining copies packets and encodes little besides the sound: it takes this long only if a disk or a machine hangs.
_TIMEOUT_S = 600.0
_CONVERSION_S = 6 * 3600.0  # Longer than any video takes that people continue.
_LAYOUTS = ("mono", "stereo")  # Those of the sound that this program writes.
_TRIAL_FRAMES = 3  # A single frame is encoded in another way.
_LEAST_ROOM = 2**20  # Bytes. Less remains only when ffmpeg has filled a disk.
_FACT = re.compile(r"#(\w+) (\d+)[:,]\s*(.+)")


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
        sound: Rate and channel layout of its sound, if it has any.
    """

    path: Path
    settings: tuple[tuple[str, str], ...]
    rate: Fraction
    is_even: bool
    frames: int
    sound: tuple[str, str] | None

    @property
    def tick(self) -> Fraction:
        """The unit of time of its frames, in seconds."""
        return Fraction(dict(self.settings)["tb"])

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        width, height = dict(self.settings)["dimensions"].split("x")
        return int(width), int(height)


def read_clip(path: Path) -> Clip:
    """Return the description of a video file; raises `InvalidRequest`, `OutputError`, `Unavailable`."""
    streams = ["-map", "0:V:0", "-map", "0:a:0?", "-c", "copy", "-f", "framehash", "-"]
    text, described = _run(["-v", "info", "-nostats", "-i", _place(path), *streams], path)
    facts: dict[str, dict[str, str]] = {"0": {}, "1": {}}
    frames: list[tuple[int, int]] = []  # The start and the duration of each frame.
    for line in text.decode().splitlines():
        if (fact := _FACT.match(line)) is not None:
            facts[fact[2]][fact[1]] = fact[3]
        elif line.startswith("0,"):
            _, _, timestamp, duration, *_ = line.split(",")
            frames.append((int(timestamp), int(duration)))
    frames.sort()
    times = [timestamp for timestamp, _ in frames]
    # A single frame has only its duration to tell the rate.
    span, steps = (times[-1] - times[0], len(times) - 1) if len(times) > 1 else (frames[0][1] if frames else 0, 1)
    if span <= 0:
        raise InvalidRequest(f"video {path} has no frames that last; save it again as an mp4", "video")
    video, sound = facts["0"], facts["1"]
    is_even = (
        span % steps == 0
        and times == [index * (span // steps) for index in range(len(times))]
        and video.get("sar", "1/1") in ("0/1", "1/1")
        and b"Display Matrix:" not in described
    )
    tick = Fraction(video["tb"])
    rate = Fraction(steps, span) / tick
    sound_format = (sound["sample_rate"], sound["channel_layout_name"]) if "channel_layout_name" in sound else None
    return Clip(path, tuple(sorted(video.items())), rate, is_even, len(times), sound_format)


def join_videos(clips: Sequence[Path], output: Path, *, cancelled: threading.Event | None = None) -> None:
    """Write a video that shows files one after another, in the size and at the rate of the last one.

    Packets are copied from files that are encoded with the settings of the last one; other files are converted first.
    Sound is always encoded again, once, because its packets begin and end between frames. The sound of a file is cut or
    padded to its frames, and a file without any is silent where another has some. A file whose frames begin after its
    sound shows the first one from the beginning.

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
        last, script, partial = files[-1], folder / "parts", folder / "joined.mp4"
        script.write_text("ffconcat version 1.0\n" + "".join(_part(clip) for clip in files))
        # A list of files holds durations in microseconds. Here every frame gets the time that its number gives it.
        ticks = 1 / (last.rate * last.tick)
        exact = f"setts=pts=round(PTS/{ticks})*{ticks}:dts=round(DTS/{ticks})*{ticks}"
        # The list of files is the input after the files themselves. Sound begins before the first frame, by its
        # encoder's delay; without -copyts, the frames would be late by that much.
        command = [argument for clip in files for argument in ("-i", _place(clip.path))]
        command += ["-f", "concat", "-safe", "0", "-auto_convert", "0", "-i", _place(script)]
        maps = ["-map", f"{len(files)}:v", "-c:v", "copy", "-bsf:v", exact, "-copyts"]
        sound = next((clip.sound for clip in reversed(files) if clip.sound is not None), None)
        if sound is not None:
            command += ["-filter_complex", ";".join(_join_sound(files, sound))]
            maps += ["-map", "[sound]", *AAC.split()]
        _run([*command, *maps, "-movflags", "+faststart", str(partial)], output, cancelled=cancelled)
        os.replace(partial, output)


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


def _join_sound(clips: Sequence[Clip], sound: tuple[str, str]) -> list[str]:
    """Return filters that join the sound of files, each of which lasts as long as its frames at the last one's rate."""
    rate, layout = sound
    layout = layout if layout in _LAYOUTS else "stereo"
    filters, frames = [], 0
    for index, clip in enumerate(clips):
        # Each file's sound begins at the sample that is nearest to its first frame, however many files there are.
        begin, frames = frames, frames + clip.frames
        start, stop = (round(place / clips[-1].rate * int(rate)) for place in (begin, frames))
        if clip.sound is None:
            filters.append(f"anullsrc=r={rate}:cl={layout},atrim=end_sample={stop - start}[a{index}]")
            continue
        # Gaps at the beginning or within the sound become silence, so that the rest stays in sync.
        steps = [
            f"aresample={rate}:async=1:first_pts=0",
            *mix_sound(clip.sound[1], layout),
            f"apad=whole_len={stop - start}",
        ]
        steps += [f"atrim=end_sample={stop - start}"] if clip is not clips[-1] else []
        filters.append(f"[{index}:a:0]{','.join(steps)}[a{index}]")
    return [*filters, "".join(f"[a{index}]" for index in range(len(clips))) + f"concat=n={len(clips)}:v=0:a=1[sound]"]


def _part(clip: Clip) -> str:
    """Return a file's lines in a list of files to join, with its frames' duration: its sound may end later."""
    name = str(clip.path.absolute()).replace("'", "'\\''")
    return f"file '{name}'\nduration {float(clip.frames / clip.rate):.9f}\n"


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
