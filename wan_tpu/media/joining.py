"""Continue videos: read a video's last frame, and join a video with the clips that continue it."""

import contextlib
import io
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from PIL import Image

from wan_tpu.errors import InvalidRequest, OutputError, Unavailable
from wan_tpu.media.encoding import AAC, COLOURS, H264, SQUARE, TO_SDR, is_hdr
from wan_tpu.media.ffmpeg import run_ffmpeg
from wan_tpu.media.temporary import open_folder
from wan_tpu.media.video import check_ffmpeg

# Joining copies packets and encodes little besides the sound: it takes this long only if a disk or a machine hangs.
_TIMEOUT_S = 600.0
_FACT = re.compile(r"#(\w+) (\d+)[:,]\s*(.+)")


@dataclass(frozen=True)
class Clip:
    """A video file, as its packets describe it.

    Attributes:
        path: The file.
        settings: Codec, size and everything else that must be equal in two files whose packets are to form one stream.
        rate: Frames per second; the average of a file whose rate varies.
        is_even: Whether its frames follow each other at exactly that rate from the start of the file.
        frames: How many frames it has.
        lasts: Seconds from where its sound may begin until its last frame ends.
        sound: Rate and channel layout of its sound, if it has any.
    """

    path: Path
    settings: tuple[tuple[str, str], ...]
    rate: Fraction
    is_even: bool
    frames: int
    lasts: Fraction
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
    text = _run(["-i", _place(path), "-map", "0:V:0", "-map", "0:a:0?", "-c", "copy", "-f", "framehash", "-"], path)
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
    is_even = span % steps == 0 and times == [index * (span // steps) for index in range(len(times))]
    tick = Fraction(video["tb"])
    rate, lasts = Fraction(steps, span) / tick, (times[-1] + (frames[-1][1] or Fraction(span, steps))) * tick
    sound_format = (sound["sample_rate"], sound["channel_layout_name"]) if "channel_layout_name" in sound else None
    return Clip(path, tuple(sorted(video.items())), rate, is_even, len(times), lasts, sound_format)


def join_videos(clips: Sequence[Path], output: Path, *, cancelled: threading.Event | None = None) -> None:
    """Write a video that shows files one after another, in the size and at the rate of the last one.

    Packets are copied where all files were encoded with the same settings; else all frames are encoded again. Sound is
    always encoded again, once, because its packets begin and end between frames. The sound of a file is cut or padded
    to its frames, and a file without any is silent where another has some. A file whose frames begin after its sound
    shows the first one from the beginning.

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
    files = [read_clip(path) for path in clips]
    last = files[-1]
    alike = all(clip.is_even and (clip.settings, clip.rate) == (last.settings, last.rate) for clip in files)
    filters = [] if alike else _encode_frames(files)
    # The list of files is the input after the files themselves. Sound begins before the first frame, by its encoder's
    # delay; without -copyts, the frames would be late by that much.
    maps = ["-map", "[frames]", *H264.split()]
    if alike:
        # A list of files holds durations in microseconds. Here every frame gets the time that its number gives it.
        ticks = 1 / (last.rate * last.tick)
        exact = f"setts=pts=round(PTS/{ticks})*{ticks}:dts=round(DTS/{ticks})*{ticks}"
        maps = ["-map", f"{len(files)}:v", "-c:v", "copy", "-bsf:v", exact, "-copyts"]
    sound = next((clip.sound for clip in reversed(files) if clip.sound is not None), None)
    if sound is not None:
        filters += _join_sound(files, sound)
        maps = [*maps, "-map", "[sound]", *AAC.split()]
    with _open_folder(output.absolute().parent) as folder:
        script, partial = folder / "parts", folder / "joined.mp4"
        script.write_text("ffconcat version 1.0\n" + "".join(_part(clip) for clip in files))
        command = [argument for path in clips for argument in ("-i", _place(path))]
        command += ["-f", "concat", "-safe", "0", "-auto_convert", "0", "-i", _place(script)] if alike else []
        command += ["-filter_complex", ";".join(filters)] if filters else []
        _run([*command, *maps, "-movflags", "+faststart", str(partial)], output, cancelled=cancelled)
        os.replace(partial, output)


def read_last_frame(path: Path) -> Image.Image:
    """Return a video's last frame, RGB and upright; raises `InvalidRequest`, `OutputError`, `Unavailable`."""
    check_ffmpeg()
    with _open_folder() as folder:
        picture = folder / "last.ppm"
        # The last seconds suffice for nearly all videos, but some have frames that end long before their sound.
        for start in (["-sseof", "-3"], []):
            target = ["-map", "0:V:0", "-fps_mode", "passthrough", "-vf", ",".join([SQUARE, *_list_sdr_filters(path)])]
            target += ["-pix_fmt", "rgb24", "-update", "1", str(picture)]
            _run([*start, "-i", _place(path), *target], path)
            if picture.exists():
                with Image.open(picture) as image:
                    image.load()
                    return image
    raise InvalidRequest(f"video {path} has no frames; give an mp4, or what else ffmpeg reads", "video")


def read_end(video: Path | bytes, frames: int) -> Image.Image:
    """Return the last of the `frames` frames of a video, RGB; raises `InvalidRequest`, `Unavailable`.

    Args:
        video: The file, or its content with the index at the beginning, where this program writes it.
        frames: How many frames the video has.
    """
    path, content = (video, b"") if isinstance(video, Path) else (Path("upload"), video)
    source = "-" if isinstance(video, bytes) else _place(video)
    last = ["-vf", f"select=eq(n\\,{frames - 1})", "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-"]
    picture = _run(["-threads", "1", "-i", source, "-map", "0:V:0", *last], path, content)
    if not picture:
        raise InvalidRequest(f"the video has fewer than {frames} frames; save it again", "video")
    with Image.open(io.BytesIO(picture), formats=["PPM"]) as image:
        image.load()
        return image


def _encode_frames(clips: Sequence[Clip]) -> list[str]:
    """Return filters that convert the frames of files to the size and the rate of the last file, and join them."""
    (width, height), rate = clips[-1].size, clips[-1].rate
    fit = f"scale={width}:{height}:force_original_aspect_ratio=increase:flags=lanczos,crop={width}:{height},setsar=0"
    filters = []
    for index, clip in enumerate(clips):
        # The last frame is repeated until there are enough frames, however the file states its duration.
        rated = f"tpad=stop=-1:stop_mode=clone,fps={rate}:start_time=0,trim=end_frame={_count_frames(clip, rate)}"
        steps = [rated, SQUARE, fit, *_list_sdr_filters(clip.path), COLOURS]
        filters.append(f"[{index}:V:0]{','.join(steps)}[v{index}]")
    return [*filters, "".join(f"[v{index}]" for index in range(len(clips))) + f"concat=n={len(clips)}[frames]"]


def _count_frames(clip: Clip, rate: Fraction) -> int:
    """Return the number of a file's frames at another rate. Its sound must last exactly that long."""
    return clip.frames if clip.is_even and clip.rate == rate else max(1, round(clip.lasts * rate))


def _list_sdr_filters(path: Path) -> list[str]:
    """Return the filters that make an HDR video look right on an ordinary display; none for other videos."""
    described = run_ffmpeg(["-hide_banner", "-i", _place(path)], timeout_s=_TIMEOUT_S)
    return [TO_SDR] if is_hdr(described.stderr) else []


def _join_sound(clips: Sequence[Clip], sound: tuple[str, str]) -> list[str]:
    """Return filters that join the sound of files, each of which lasts as long as its frames at the last one's rate."""
    rate, layout = sound
    filters, frames = [], 0
    for index, clip in enumerate(clips):
        # Each file's sound begins at the sample that is nearest to its first frame, however many files there are.
        begin, frames = frames, frames + _count_frames(clip, clips[-1].rate)
        start, stop = (round(place / clips[-1].rate * int(rate)) for place in (begin, frames))
        if clip.sound is None:
            filters.append(f"anullsrc=r={rate}:cl={layout},atrim=end_sample={stop - start}[a{index}]")
            continue
        # Gaps at the beginning or within the sound become silence, so that the rest stays in sync.
        steps = [
            f"aresample={rate}:async=1:first_pts=0",
            f"aformat=channel_layouts={layout}",
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
def _open_folder(parent: Path | None = None) -> Iterator[Path]:
    """Open a folder for temporary files; raises `OutputError`, also within the block, if the disk can't hold them."""
    try:
        with open_folder(parent) as folder:
            yield folder
    except OSError as error:
        place = parent or "the folder for temporary files"
        raise OutputError(f"can't write in {place} ({error.strerror or error}); make room there") from None


def _place(path: Path) -> str:
    """Return a path that ffmpeg can use: it reads a colon in a relative path as a protocol."""
    return str(path.absolute())


def _run(
    arguments: Sequence[str], path: Path, content: bytes = b"", *, cancelled: threading.Event | None = None
) -> bytes:
    """Run ffmpeg with `content` as its input, and return its output; errors name the file `path`."""
    command = ["-y", "-v", "error", *arguments]
    try:
        done = run_ffmpeg(command, content, timeout_s=_TIMEOUT_S, cancelled=cancelled)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"ffmpeg doesn't finish {path} within {_TIMEOUT_S:g} s; check this machine") from None
    except OSError as error:
        raise Unavailable(f"ffmpeg can't be started ({error.strerror}); make room on this machine") from None
    if done.returncode < 0:
        raise Unavailable(f"ffmpeg was ended by signal {-done.returncode} at {path}; check this machine's memory")
    if done.returncode:
        message = (done.stderr.decode(errors="replace").strip().splitlines() or ["it has no frames"])[-1]
        if arguments[-1] == "-" or arguments[-1].endswith(".ppm"):
            raise InvalidRequest(
                f"video {path} can't be read ({message[:200]}); give an mp4, or what else ffmpeg reads", "video"
            )
        raise OutputError(f"{path} can't be joined ({message[:200]}); check the disk")
    return done.stdout
