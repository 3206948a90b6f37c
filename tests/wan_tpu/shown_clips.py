"""Videos of every kind that show the same frames, which are known: what a reader of videos is held against."""

import dataclasses
import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
HEIGHT, WIDTH, FRAMES, FPS = 48, 72, 10, 10
RATE = 44100
LEFT, RIGHT = 440, 880  # Hz


@functools.cache
def paint(index: int) -> np.ndarray:
    """Return a frame, uint8 [H, W, 3]: smooth, with another colour in each corner, and different from all others."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH] / np.array([[[HEIGHT]], [[WIDTH]]])
    red, green, blue = 50 + 140 * x, 60 + 120 * y, 190 - 60 * x - 60 * y
    red = red + 40 * np.exp(-(((x - index / FRAMES) * 6) ** 2))
    return np.stack([red, green, blue], -1).round().astype(np.uint8)


def play(*indices: int) -> np.ndarray:
    """Return frames, uint8 [T, H, W, 3], by default all."""
    return np.stack([paint(index) for index in indices or range(FRAMES)])


def tones(channels: int, rate: int) -> np.ndarray:
    """Return sound for the whole clip, int16 [samples, channels]: a tone in each of the first two channels."""
    times = np.arange(rate * FRAMES // FPS) / rate
    sound = np.zeros((len(times), channels))
    for channel, pitch in zip(range(channels), (LEFT, RIGHT), strict=False):
        sound[:, channel] = np.sin(2 * np.pi * pitch * times) / 2
    return (sound * 32767).astype("<i2")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of video.

    Attributes:
        make: Writes one to a path.
        shown: The frames that it shows at `FPS`.
        tolerance: How far the mean of a channel of a frame may be from that.
        suffix: What its name ends in.
    """

    make: Callable[[Path], None]
    shown: np.ndarray
    tolerance: float = 0.7
    suffix: str = ".mp4"


def run(*arguments: object, content: bytes | None = None) -> None:
    """Run ffmpeg."""
    command = [FFMPEG, "-y", "-v", "error", *map(str, arguments)]
    subprocess.run(command, input=content, stdin=None if content is not None else subprocess.DEVNULL, check=True)


def write(
    path: Path,
    *options: str,
    filters: str = "scale=out_color_matrix=bt601,format=yuv420p,setparams=colorspace=smpte170m",
    frames: np.ndarray | None = None,
    sound: list[str] | None = None,
    codec: str = "-c:v libx264 -qp 0",
) -> None:
    """Write frames, nearly without loss, with the given filters and options."""
    frames = play() if frames is None else frames
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    raw = f"-f rawvideo -pix_fmt rgb24 -s {size} -r {FPS} -i -".split()
    exact = re.sub(r"^scale=", "scale=flags=accurate_rnd+full_chroma_inp:", filters)
    run(*raw, *(sound or []), "-vf", exact, *codec.split(), *options, path, content=frames.tobytes())


def tag(path: Path, *options: str, before: tuple[str, ...] = (), **how: object) -> None:
    """Write frames to a file, and copy it with options, which describe it otherwise."""
    plain = path.with_suffix(f".plain{path.suffix}")
    write(plain, **how)  # type: ignore[arg-type]
    run(*before, "-i", plain, "-c", "copy", *options, path)
    plain.unlink()


def _turned(degrees: int) -> Kind:
    # The file holds frames that have to be turned against the clock.
    stored = np.rot90(play(), -degrees // 90, axes=(1, 2))
    return Kind(
        lambda path: tag(path, before=("-display_rotation", str(degrees)), frames=np.ascontiguousarray(stored)), play()
    )


def _deep(curve: str, *, matrix: str = "bt2020nc", primaries: str = "bt2020", tags: str | None = None) -> Kind:
    """Return a kind of ten bits with another curve; the tags, by default its own, are what the file says."""
    linear = "format=gbrp,setparams=color_primaries=bt709:color_trc=bt709:colorspace=gbr,zscale=t=linear:npl=203"
    filters = f"{linear},format=gbrpf32le,zscale=p={primaries}:t={curve}:m={matrix}:r=tv:npl=203,format=yuv420p10le"
    stated = tags or f"colorspace={matrix}:color_primaries={primaries}:color_trc={curve}"
    # Tone mapping, which compresses what is brighter than paper, also moves what is a little darker.
    return Kind(
        lambda path: write(path, filters=f"{filters},setparams={stated}"), play(), tolerance=0.7 if "bt" in curve else 2
    )


def _stretched() -> Kind:
    size = WIDTH * 4 // 3, HEIGHT
    wide = np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)) for frame in play()])
    filters = "scale=out_color_matrix=bt601,format=yuv420p,setparams=colorspace=smpte170m,setsar=4/3"
    return Kind(lambda path: write(path, filters=filters), wide)


def _tall() -> Kind:
    """Return a kind of 720 lines that says nothing of its colours."""
    tall = np.repeat(play(*range(5)), 15, axis=1)
    filters = "scale=out_color_matrix=bt709:out_range=tv,format=yuv420p,setparams=colorspace=unknown:range=unknown"
    return Kind(lambda path: write(path, filters=filters, frames=tall), tall)


def _late(path: Path) -> None:
    sound = ["-f", "lavfi", "-i", f"sine={LEFT}:d=1:r={RATE}"]
    write(path, sound=sound, filters=f"{_PLAIN},setpts=PTS+3")


def _trimmed(path: Path) -> None:
    # The first three frames are there, because others need them, but they are hidden by the edit list.
    tag(path, before=("-ss", "0.3"))


_PLAIN = "scale=out_color_matrix=bt601,format=yuv420p,setparams=colorspace=smpte170m"
_FULL = "format=gbrp,zscale=m=bt709:r=full,format=yuv420p,setparams=colorspace=bt709"
KINDS = {
    "plain": Kind(write, play()),
    "turned by 90": _turned(90),
    "mirrored": Kind(
        lambda path: tag(path, before=("-display_hflip",), frames=np.ascontiguousarray(play()[:, :, ::-1])), play()
    ),
    "sample aspect ratio": _stretched(),
    "begins after its sound": Kind(_late, play(0, 0, 0, *range(FRAMES))),
    "edit list": Kind(_trimmed, play(*range(3, FRAMES))),
    "PQ": _deep("smpte2084"),
    "HLG": _deep("arib-std-b67"),
    "PQ without primaries and matrix": _deep("smpte2084", tags="color_trc=smpte2084:colorspace=unknown"),
    "HLG without primaries": _deep("arib-std-b67", tags="color_primaries=unknown"),
    "wide colours": _deep("bt2020-10"),
    "wide colours without a curve": _deep("bt709", tags="color_trc=unknown"),
    "Display P3": _deep("bt709", matrix="bt709", primaries="smpte432"),
    "full range": Kind(lambda path: write(path, filters=_FULL), play()),
    "full range without a matrix": Kind(
        lambda path: write(path, filters=_FULL.replace("bt709:", "smpte170m:").replace("=bt709", "=unknown")), play()
    ),
    "720 lines without colours": _tall(),
    "ten bits": Kind(lambda path: write(path, filters=_PLAIN.replace("yuv420p", "yuv420p10le")), play()),
    "RGB": Kind(lambda path: write(path, codec="-c:v ffv1", filters="format=gbrp"), play(), suffix=".mkv"),
    "variable rate": Kind(
        lambda path: write(path, "-fps_mode", "vfr", filters=f"{_PLAIN},select=not(eq(n\\,3)+eq(n\\,4)+eq(n\\,7))"),
        play(0, 1, 2, 2, 2, 5, 6, 6, 8, 9),
    ),
    "milliseconds as its rate": Kind(
        lambda path: write(
            path, "-fps_mode", "vfr", "-enc_time_base", "1:1000", filters=f"{_PLAIN},fps=1000,select=not(mod(n\\,100))"
        ),
        play(),
        suffix=".mkv",
    ),
    "GIF": Kind(
        lambda path: write(path, codec="", filters="split[a][b];[a]palettegen[p];[b][p]paletteuse"),
        play(),
        tolerance=4,
        suffix=".gif",
    ),
}


@dataclasses.dataclass(frozen=True)
class SoundKind:
    """A kind of sound: how its samples are written to a file of sound, and the tones that it has left and right.

    It begins `starts` seconds after the frames.
    """

    channels: int
    options: str = ""
    rate: int = RATE
    tones: tuple[int, int] = (LEFT, RIGHT)
    unnamed: bool = False
    starts: float = 0

    def make(self, path: Path) -> None:
        """Write one second to a QuickTime file."""
        samples = path.with_suffix(".samples")
        samples.write_bytes(tones(self.channels, self.rate).tobytes())
        run("-f", "s16le", "-ar", self.rate, *self.options.split(), "-i", samples, "-c:a", "pcm_s16le", path)
        if self.unnamed:
            _unname(path)

    def accompany(self, frames: Path, path: Path, *options: str) -> None:
        """Write a QuickTime file with the frames of another one and this sound."""
        sound = path.with_name("sound.mov")
        self.make(sound)
        streams = ["-itsoffset", self.starts, "-i", sound, "-i", frames, "-map", "1:v", "-map", "0:a", "-c", "copy"]
        run(*streams, *options, path)


def _unname(path: Path) -> None:
    """Make the four channels of a QuickTime file "unused"."""
    content = bytearray(path.read_bytes())
    count = content.index(b"chan") + 16  # Behind the kind, the version, and a layout that stands for a list.
    assert int.from_bytes(content[count : count + 4], "big") == 4
    for channel in range(4):
        start = count + 4 + 20 * channel
        content[start : start + 4] = bytes(4)
    path.write_bytes(content)


SOUNDS = {
    "mono": SoundKind(1, "-ac 1", tones=(LEFT, LEFT)),
    "stereo": SoundKind(2, "-ac 2"),
    "stereo at 192 kHz": SoundKind(2, "-ac 2", rate=192000),
    "stereo at 8 kHz": SoundKind(2, "-ac 2", rate=8000),
    "5.1": SoundKind(6, "-ch_layout 5.1"),
    "nine channels without names": SoundKind(9, "-ac 9"),
    "four channels that are unused": SoundKind(4, "-ch_layout FC+FR+FL+TFC", unnamed=True),
    "begins after its frames": SoundKind(2, "-ac 2", starts=0.5),
}
