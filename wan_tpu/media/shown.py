"""Read what a video shows: upright, with square pixels, in the colours of an ordinary display, at a constant rate.

Whoever reads or converts a video does it with `ShownVideo`, so that all of them get the same frames and the same sound.
"""

import itertools
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from PIL import Image

from wan_tpu.errors import InvalidRequest
from wan_tpu.media.encoding import AAC, BT709, COLOURS, EXACT, H264, TAGS
from wan_tpu.media.image import has_shape

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[bytes]"]
"""Runs ffmpeg with a video as its only input, and with the given options."""

# Where a file doesn't say its matrix, players take BT.709 from so many lines on (Chromium's ffmpeg_common.cc), and else
# BT.601, as ffmpeg does at every size.
_LINES_OF_BT709 = 720
_HDR_CURVES = {"smpte2084", "arib-std-b67"}  # PQ and HLG.
_WIDE_PRIMARIES = {"bt2020", "smpte431", "smpte432"}
# Brightness up to that of paper hardly changes, and anything brighter is compressed.
_TO_SDR = "zscale=t=linear:npl=203,format=gbrpf32le,tonemap=mobius:desat=0"
_TO_BT709 = "zscale=p=bt709:t=bt709:m=bt709:r=tv,format=yuv444p"
_TO_LIMITED = "zscale=m=bt709:r=tv,format=yuv444p"  # The filter scale would be off by a level.
# How often a frame from which a video goes on is corrected by what it would look like. Ten continuations of clipped,
# coarse noise move the mean by up to 2.1 of 255 without it, by 0.9 with two, and by 0.6 with three.
_CORRECTIONS = 5
_FASTEST = 60  # A higher rate is often only the file's unit of time.
_MEASURED = 60  # Frames after which the rate of such a file is known.
_ENDINGS = ("", ":eof_action=pass")  # The second one is for videos that last for less than half a frame.
_RATE = re.compile(rb"^\[Parsed_showinfo_\S* @ \S+\] config in time_base: \S+, frame_rate: (\d+)/([1-9]\d*)", re.M)
_FRAME = re.compile(rb"^\[Parsed_showinfo_.*? pts_time:(\S+) .*? fmt:(\S+) .*? sar:(\d+)/(\d+) s:(\d+)x(\d+) ", re.M)
_COLOURS = re.compile(
    rb"^\[Parsed_showinfo_.*? color_range:(\S+) color_space:(\S+) color_primaries:(\S+) color_trc:(\S+)", re.M
)
_SOUND = re.compile(rb"^ *Stream #0:\d.*?: Audio: .*?, \d+ Hz, ([^,]+)", re.M)
_COUNT = re.compile(rb"^frame=(\d+)$", re.M)
_PROGRESS = re.compile(rb"^\w+=.*$", re.M)
_SPEAKER = re.compile(r"\[[^\[\]]*\] *")  # The name and address of a component, which ffmpeg puts before a message.
_NAMELESS = re.compile(r"(\d+) channels|ambisonic")


@dataclass(frozen=True)
class Fit:
    """A size that frames are brought to, as `wan_tpu.media.image.fit_image` does it with an image.

    Attributes:
        height: Pixels.
        width: Pixels.
        slack: Frames whose shape differs by fewer pixels of a side are resized without being cropped.
    """

    height: int
    width: int
    slack: int = 0


class ShownVideo:
    """A video as a player shows it.

    Its frames are turned and mirrored as the file says, their pixels are square, and HDR and wide colours become those
    of an ordinary display. They follow each other at one rate from the beginning of the file: a frame that comes late
    is preceded by copies of the one before it, or, at the beginning, by copies of itself.

    Attributes:
        height: Pixels of a frame.
        width: Likewise.
        rate: Frames per second at which none of the file's frames is lost.
    """

    def __init__(self, run: Run, name: str, remedy: str) -> None:
        """Decode the first frame.

        Args:
            run: Runs ffmpeg. It raises what stopped ffmpeg, unless that was the file.
            name: The video, in messages.
            remedy: What to do about a file that can't be read.

        Raises:
            InvalidRequest: The file can't be read as a video.
        """
        self._run, self._name, self._remedy = run, name, remedy
        done = run(["-v", "info", *_list_frames(1), "-vf", "showinfo", "-f", "null", "-"])
        frame, colours = _FRAME.search(done.stderr), _COLOURS.search(done.stderr)
        if done.returncode or frame is None or colours is None:
            # What ffmpeg says of a file that it can read isn't why it can't.
            raise self._refuse(run(["-v", "error", *_list_frames(1), "-f", "null", "-"]).stderr)
        across, down, width, height = (int(number) for number in frame.groups()[2:])
        self.height, self.width = height, max(1, round(width * across / down)) if across and down else width
        self._stored = width, height  # Its pixels needn't be square.
        self._shares_colours = frame[2].startswith((b"yuv420", b"yuvj420"))
        self.rate = self._find_rate(done.stderr)
        span, matrix, primaries, curve = (text.decode() for text in colours.groups())
        guess = "bt709" if self.height >= _LINES_OF_BT709 else "smpte170m"
        self._to_bt709 = _convert_colours(matrix, primaries, curve)
        if not self._to_bt709 and span == "pc" and frame[2].startswith(b"yuv"):
            self._to_bt709 = [*([f"setparams=colorspace={guess}"] if matrix == "unknown" else []), _TO_LIMITED]
        self._matrix = guess if matrix == "unknown" and not self._to_bt709 else "auto"
        self._layout = _find_layout(done.stderr)

    @property
    def has_sound(self) -> bool:
        """Whether the file has sound."""
        return self._layout is not None

    def read_pictures(
        self,
        *,
        rate: Fraction | None = None,
        select: str | None = None,
        count: int | None = None,
        fit: Fit | None = None,
    ) -> list[Image.Image]:
        """Return frames, RGB.

        Args:
            rate: Frames per second, by default the file's.
            select: Which frames, as an expression of ffmpeg about their number n; by default all.
            count: How many of these at most.
            fit: Their size, by default the file's.

        Raises:
            InvalidRequest: The file can't be read.
        """
        chosen = [] if select is None else [f"select='{select}'"]
        size = fit or Fit(self.height, self.width)
        return self._read([*chosen, *self._convert(size, "rgb24", "")], size, rate or self.rate, count)

    def read_end(self, index: int) -> Image.Image | None:
        """Return the picture with which the video goes on after a frame, RGB, or None if there is no such frame.

        It is the picture that looks as that frame does once this program has encoded it. Four pixels share their colour
        in the file. So colours are blurred each time that a frame is read and written, and the mean moves where blurred
        ones are out of range. A file that has a colour for each pixel is taken as it is: no picture looks as it does.

        Args:
            index: The frame's number, at the file's rate.

        Raises:
            InvalidRequest: The file can't be read.
        """
        size, select = Fit(self.height, self.width), f"select='eq(n,{index})'"
        convert = (
            [*self._convert(size, "gbrp", ""), _correct()] if self._shares_colours else self._convert(size, "rgb24", "")
        )
        frames = self._read([select, *convert], size, self.rate, 1)
        return frames[0] if frames else None

    def _read(self, filters: Sequence[str], size: Fit, rate: Fraction, count: int | None) -> list[Image.Image]:
        """Return frames of a size, in rgb24."""
        pixels, _ = self._decode(filters, [*_list_frames(count), "-f", "rawvideo", "-"], rate, least=0)
        length = 3 * size.width * size.height
        starts = range(0, len(pixels) - length + 1, length)
        return [Image.frombytes("RGB", (size.width, size.height), pixels[start : start + length]) for start in starts]

    def count_frames(self, rate: Fraction | None = None, *, most: int | None = None) -> int:
        """Return how many frames there are at a rate, by default the file's; raises `InvalidRequest`.

        No more than `most` are decoded and counted.
        """
        return self._decode([], [*_list_frames(most), "-f", "null", "-"], rate or self.rate)[1]

    def encode(
        self, fit: Fit, rate: Fraction | None, target: Sequence[str], *, count: int | None = None, sound: bool
    ) -> tuple[bytes, int]:
        """Encode the video as the videos that this program makes are encoded.

        Args:
            fit: The size.
            rate: Frames per second, by default the file's.
            target: Options of the encoder that differ, those of the container, and the output.
            count: The most frames.
            sound: Whether to encode the sound, in stereo. Frames and sound begin together.

        Returns:
            The output and the number of frames.

        Raises:
            InvalidRequest: The file can't be read.
        """
        # The encoder takes a rate only together with this mode, which has nothing to do after the filters.
        options = [*_list_frames(count), "-fps_mode", "cfr", *H264.split()]
        if sound and self._layout is not None:
            options += ["-map", "0:a:0", "-af", play_sound(self._layout, "stereo"), *AAC.split()]
        filters = self._convert(fit, "yuv420p", f":{BT709}")
        return self._decode([*filters, "setsar=0", TAGS], [*options, *target], rate or self.rate)

    def _convert(self, fit: Fit, pixels: str, colours: str) -> list[str]:
        """Return the filters that bring frames to a size, to the colours of an ordinary display and to a format."""
        width, height, crop = fit.width, fit.height, []
        if not has_shape(Image.new("1", (self.width, self.height)), height, width, fit.slack):
            factor = max(Fraction(width, self.width), Fraction(height, self.height))
            size = max(width, round(self.width * factor)), max(height, round(self.height * factor))
            crop, (width, height) = [f"crop={width}:{height}"], size
        # Whatever isn't resized stays as it is when it is read and written again and again.
        kernel = "bicubic" if (width, height) == self._stored else "lanczos"
        resize, convert = f"scale={width}:{height}:flags={kernel}+{EXACT}", f"in_color_matrix={self._matrix}{colours}"
        if not self._to_bt709:
            return [f"{resize}:{convert}", f"format={pixels}", *crop]
        return [resize, *self._to_bt709, f"scale=flags=bicubic+{EXACT}:{convert}", f"format={pixels}", *crop]

    def _decode(
        self, filters: Sequence[str], options: Sequence[str], rate: Fraction, *, least: int = 1
    ) -> tuple[bytes, int]:
        """Run ffmpeg; return its output and the number of frames, which must be `least` or more."""
        for ending in _ENDINGS:
            graph = ",".join([f"fps={rate}:start_time=0{ending}", *filters])
            done = self._run(["-v", "error", "-vf", graph, "-progress", "pipe:2", *options])
            counts = _COUNT.findall(done.stderr)
            frames = int(counts[-1]) if counts else 0
            if frames:
                break
        if done.returncode or frames < least:
            raise self._refuse(done.stderr)
        return done.stdout, frames

    def _find_rate(self, described: bytes) -> Fraction:
        """Return the file's rate; if its unit of time is given for it, the rate that most frames have."""
        stated = _RATE.search(described)
        rate = Fraction(int(stated[1]), int(stated[2])) if stated is not None else Fraction()
        if 0 < rate <= _FASTEST:
            return rate
        done = self._run(["-v", "info", *_list_frames(_MEASURED), "-vf", "showinfo", "-f", "null", "-"])
        times = [float(frame[1]) for frame in _FRAME.finditer(done.stderr)]
        steps = sorted(later - time for time, later in itertools.pairwise(times) if later > time)
        if not steps:
            return rate or Fraction(1)
        usual = steps[len(steps) // 2]
        usual_steps = [step for step in steps if abs(step - usual) <= max(0.0015, usual / 10)]
        measured = Fraction(len(usual_steps) / sum(usual_steps)).limit_denominator(1001)
        # Frames at twice the usual distance, and the like, are those that a recorder has left out.
        return rate if 0 < rate < 1.5 * measured else measured

    def _refuse(self, messages: bytes) -> InvalidRequest:
        return _refuse(self._name, self._remedy, messages, "it has no frames")


def decode_sound(
    run: Run, name: str, remedy: str, target: Sequence[str], *, least: int = 1
) -> "subprocess.CompletedProcess[bytes]":
    """Decode a file's sound, in one or two channels, as it is played beside its frames, which it needn't have.

    Args:
        run: As for `ShownVideo`.
        name: The sound, in messages.
        remedy: What to do about a file that can't be read.
        target: Options for the part of the sound, the encoder and the container, and the output.
        least: Bytes that the output must have.

    Returns:
        The output, and ffmpeg's description of it.

    Raises:
        InvalidRequest: The file can't be read, or has no sound.
    """
    chosen = ["-map", "0:a:0"]
    described = run(["-v", "info", *chosen, "-c", "copy", "-frames:a", "1", "-f", "null", "-"])
    layout = _find_layout(described.stderr)
    played = [] if layout is None else ["-af", play_sound(layout, "mono" if layout == "mono" else "stereo")]
    options = [*chosen, *played, *target]
    done = run(["-v", "info", *options])
    if layout is None or done.returncode or len(done.stdout) < least:
        raise _refuse(name, remedy, run(["-v", "error", *options]).stderr, "it has no sound")
    return done


def _find_layout(described: bytes) -> str | None:
    """Return the layout of the sound of a file that ffmpeg describes."""
    sound = _SOUND.search(described)
    return None if sound is None else sound[1].decode(errors="replace").strip()


def _refuse(name: str, remedy: str, messages: bytes, otherwise: str) -> InvalidRequest:
    lines = _SPEAKER.sub("", _PROGRESS.sub(b"", messages).decode(errors="replace")).split("\n")
    message = next((line.strip() for line in lines if line.strip()), otherwise)
    return InvalidRequest(f"{name} can't be read ({message[:200]}); {remedy}", "video")


def _list_frames(count: int | None) -> list[str]:
    """Return the options for a number of frames, each of which is written once."""
    return ["-map", "0:V:0", "-fps_mode", "passthrough", *([] if count is None else ["-frames:v", str(count)])]


def _convert_colours(matrix: str, primaries: str, curve: str) -> list[str]:
    """Return the filters that bring HDR and wide colours to BT.709; none for other videos."""
    is_hdr = curve in _HDR_CURVES
    if not is_hdr and primaries not in _WIDE_PRIMARIES and not matrix.startswith("bt2020"):
        return []
    # What such a file doesn't say is as in BT.2020, and the curve of one that isn't HDR is that of BT.709.
    missing = {
        "color_primaries": "bt2020" if primaries == "unknown" else None,
        "colorspace": "bt2020nc" if matrix == "unknown" else None,
        "color_trc": None if is_hdr else "bt709",
    }
    stated = ":".join(f"{name}={value}" for name, value in missing.items() if value is not None)
    return [*([f"setparams={stated}"] if stated else []), *([_TO_SDR] if is_hdr else []), _TO_BT709]


def _correct() -> str:
    """Return the filters from a picture in gbrp to one in rgb24 that looks as the first does once it is encoded."""
    times = range(1, _CORRECTIONS + 1)
    encoded = f"{COLOURS},scale=flags=bicubic+{EXACT},format=gbrp"
    steps = ["split={}{}[picture0]".format(_CORRECTIONS + 1, "".join(f"[wanted{time}]" for time in times))]
    for time in times:
        steps += [
            f"[picture{time - 1}]split[before{time}][copy{time}]",
            f"[copy{time}]{encoded}[seen{time}]",
            f"[wanted{time}][seen{time}]blend=all_mode=grainextract[missing{time}]",  # The difference, plus 128.
            f"[before{time}][missing{time}]blend=all_mode=grainmerge[picture{time}]",
        ]
    return ";".join([*steps, f"[picture{_CORRECTIONS}]format=rgb24"])


def play_sound(layout: str, into: str, rate: int | None = None) -> str:
    """Return the filters that bring sound to another layout, such as "stereo", and to a rate, by default its own.

    Channels without a place go to the left and to the right in turn, so that each is heard and none is too loud. Sound
    that begins later than the file, or has gaps, is silent there.
    """
    filters = [f"aformat=channel_layouts={into}"]
    if (nameless := _NAMELESS.match(layout)) is not None:
        count = int(nameless[1] or 1)  # An ambisonic recording's first channel has the sound of all directions.
        left, right = ("+".join(f"c{index}" for index in range(side, count, 2)) for side in (0, int(count > 1)))
        filters.insert(0, f"pan=stereo|c0<{left}|c1<{right}")
    resample = "aresample=" if rate is None else f"aresample={rate}:"
    return ",".join([*filters, f"{resample}async=1:first_pts=0"])
