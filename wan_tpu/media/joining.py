"""Continue videos: read a video's last frame, and join a video with the clip that continues it."""

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import imageio_ffmpeg
from PIL import Image

from wan_tpu.errors import InvalidRequest, OutputError, Unavailable
from wan_tpu.media.encoding import AAC, COLOURS, H264, SQUARE, TO_SDR, is_hdr
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


def join_videos(source: Path, segment: Path, output: Path) -> None:
    """Write a video that shows one file and then another, in the size and at the rate of the second.

    Packets are copied where both files were encoded with the same settings; else all frames are encoded again. Sound is
    always encoded again, because its packets begin and end between frames. The sound of a file is cut or padded to its
    frames, and a file without any is silent where the other has some. A file whose frames begin after its sound shows
    the first one from the beginning.

    Args:
        source: The file that comes first.
        segment: The file that continues it.
        output: The mp4, which appears once it is complete. A file there is replaced.

    Raises:
        InvalidRequest: A file can't be read as a video.
        OutputError: The result can't be written.
        Unavailable: The machine fails.
    """
    check_ffmpeg()
    first, second = read_clip(source), read_clip(segment)
    alike = first.is_even and second.is_even and (first.settings, first.rate) == (second.settings, second.rate)
    # The number of the source's frames at the segment's rate; the sound must last exactly that long.
    frames = first.frames if alike else max(1, round(first.lasts * second.rate))
    lasts = frames / second.rate
    filters, maps = ([], _COPIED) if alike else (_encode_frames(first, second, frames), _ENCODED)
    sound = second.sound or first.sound
    if sound is not None:
        filters += _join_sound((first, second), sound, lasts)
        maps = [*maps, "-map", "[sound]", *AAC.split()]
    with _open_folder(output.absolute().parent) as folder:
        script, partial = folder / "parts", folder / "joined.mp4"
        script.write_text(f"ffconcat version 1.0\n{_part(first)}{_part(second)}")
        command = ["-i", _place(source), "-i", _place(segment)]
        command += ["-f", "concat", "-safe", "0", "-auto_convert", "0", "-i", _place(script)] if alike else []
        command += ["-filter_complex", ";".join(filters)] if filters else []
        _run([*command, *maps, "-movflags", "+faststart", str(partial)], output)
        os.replace(partial, output)


def join_contents(source: bytes, segment: bytes) -> bytes:
    """Return `join_videos` of two mp4 files in memory."""
    with _open_folder() as folder:
        first, second, output = (folder / name for name in ("source.mp4", "segment.mp4", "joined.mp4"))
        first.write_bytes(source)
        second.write_bytes(segment)
        join_videos(first, second, output)
        return output.read_bytes()


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


def read_end(content: bytes, frames: int) -> Image.Image:
    """Return the last of the `frames` frames of a video in memory, RGB; raises `InvalidRequest`, `Unavailable`.

    The video is read from a pipe, so an mp4 must have its index at the beginning, as those of this program do.
    """
    last = ["-vf", f"select=eq(n\\,{frames - 1})", "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-"]
    picture = _run(["-threads", "1", "-i", "-", "-map", "0:V:0", *last], Path("upload"), content)
    if not picture:
        raise InvalidRequest(f"the video has fewer than {frames} frames; save it again", "video")
    with Image.open(io.BytesIO(picture), formats=["PPM"]) as image:
        image.load()
        return image


# Sound begins before the first frame, by its encoder's delay; without -copyts, the frames would be late by that much.
_COPIED = ["-map", "2:v", "-c:v", "copy", "-copyts"]
_ENCODED = ["-map", "[frames]", *H264.split()]


def _encode_frames(source: Clip, segment: Clip, frames: int) -> list[str]:
    """Return filters that convert `frames` frames of a source, and all of a segment, to the segment's size and rate."""
    width, height = segment.size
    fit = f"scale={width}:{height}:force_original_aspect_ratio=increase:flags=lanczos,crop={width}:{height},setsar=0"
    # The last frame is repeated until there are enough frames, however the source states its duration.
    rated = f"tpad=stop=-1:stop_mode=clone,fps={segment.rate}:start_time=0,trim=end_frame={frames}"
    before = ",".join([rated, SQUARE, fit, *_list_sdr_filters(source.path), COLOURS])
    after = f"{fit},fps={segment.rate},{COLOURS}"
    return [f"[0:V:0]{before}[v0]", f"[1:V:0]{after}[v1]", "[v0][v1]concat=n=2[frames]"]


def _list_sdr_filters(path: Path) -> list[str]:
    """Return the filters that make an HDR video look right on an ordinary display; none for other videos."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostdin", "-i", _place(path)]
    described = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False).stderr
    return [TO_SDR] if is_hdr(described) else []


def _join_sound(clips: Sequence[Clip], sound: tuple[str, str], source_s: Fraction) -> list[str]:
    """Return filters that join the sound of two files, the first of which lasts `source_s`."""
    rate, layout = sound
    filters = []
    for index, (clip, lasts) in enumerate(zip(clips, (source_s, clips[1].frames / clips[1].rate), strict=True)):
        silence = f"anullsrc=r={rate}:cl={layout}:d={float(lasts):.9f}"
        # Gaps at the beginning or within the sound become silence, so that the rest stays in sync.
        filter_ = f"[{index}:a:0]aresample={rate}:async=1:first_pts=0,aformat=channel_layouts={layout}"
        cut = f"apad=whole_dur={float(lasts):.9f}" + (f",atrim=end={float(lasts):.9f}" if index == 0 else "")
        filters.append(f"{silence if clip.sound is None else f'{filter_},{cut}'}[a{index}]")
    return [*filters, "[a0][a1]concat=n=2:v=0:a=1[sound]"]


def _part(clip: Clip) -> str:
    """Return a file's lines in a list of files to join, with its frames' duration: its sound may end later."""
    name = str(clip.path.absolute()).replace("'", "'\\''")
    return f"file '{name}'\nduration {float(clip.frames / clip.rate):.9f}\n"


@contextlib.contextmanager
def _open_folder(parent: Path | None = None) -> Iterator[Path]:
    """Open a folder for temporary files; raises `OutputError`, also within the block, if the disk can't hold them."""
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".joining.") as folder:
            yield Path(folder)
    except OSError as error:
        place = parent or "the folder for temporary files"
        raise OutputError(f"can't write in {place} ({error.strerror or error}); make room there") from None


def _place(path: Path) -> str:
    """Return a path that ffmpeg can use: it reads a colon in a relative path as a protocol."""
    return str(path.absolute())


def _run(arguments: Sequence[str], path: Path, content: bytes = b"") -> bytes:
    """Run ffmpeg with `content` as its input, and return its output; errors name the file `path`."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *arguments]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=_TIMEOUT_S, check=False)
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
