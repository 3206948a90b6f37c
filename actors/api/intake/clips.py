"""Read an untrusted video in the process that parses uploads: ffmpeg decodes it there, within the process's limits."""

import dataclasses
import io
import mmap
import os
import re
import resource
import subprocess

import imageio_ffmpeg
from PIL import Image

from actors.api.intake.references import VIDEO
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.encoding import AAC, COLOURS, H264, SQUARE, TO_SDR, is_hdr
from wan_tpu.media.image import has_shape

# At this quality the loss makes no difference to a model; files are 1.5 times as large as those of finished videos.
_FINE = "-crf 8"
# The mp4 is fragmented, since a pipe can't be rewound to complete the header. The first frame is still shown at 0.
_TARGET = "-f mp4 -movflags frag_keyframe+delay_moov+default_base_moof -progress pipe:2 pipe:1"
_PICTURE = "-f image2pipe -c:v ppm -progress pipe:2 pipe:1"
_PROGRESS = re.compile(rb"^\w+=.*$", re.MULTILINE)
_SPEAKER = re.compile(r"\[[^\[\]]*\] *")  # The name and address of a component, which ffmpeg puts before a message.
_FRAMES = re.compile(rb"^frame=(\d+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipLimits:
    """Limits on decoding an untrusted video.

    Attributes:
        pixels: The most pixels of a frame.
        cpu_s: Processor time of each run of ffmpeg.
        seconds: The longest video that may be continued.
    """

    pixels: int
    cpu_s: int
    seconds: float


class Upload:
    """A client's video, in a seekable file in memory.

    Attributes:
        size: (height, width) of a frame, upright.
    """

    def __init__(self, content: bytes, scratch: int, limits: ClipLimits) -> None:
        """Decode the first frame.

        Args:
            content: The file.
            scratch: Descriptor of a file in memory, of the largest size that a video may have.
            limits: Limits on decoding it.

        Raises:
            InvalidRequest: The file isn't a video, or is too large.
        """
        self._scratch, self._limits = scratch, limits
        most = os.fstat(scratch).st_size
        if len(content) > most:
            raise InvalidRequest(f"the video has more than {most} bytes; shrink it first", VIDEO)
        if not content:
            raise InvalidRequest("the video is empty; send an mp4 or another format that ffmpeg reads", VIDEO)
        # This process may not write to files, but it may shrink a file and map it into memory.
        os.ftruncate(scratch, len(content))
        with mmap.mmap(scratch, len(content)) as memory:
            memory[:] = content
        picture, _ = self._decode(["-frames:v", "1", "-vf", SQUARE, *_PICTURE.split()])
        with Image.open(io.BytesIO(picture), formats=["PPM"]) as first:
            self.size = first.height, first.width
        self._to_sdr = [TO_SDR] if is_hdr(self._run([]).stderr) else []

    def cut(self, frames: int, *, height: int, width: int, slack: int, step: int) -> bytes:
        """Return the first frames in another size, without sound, as an mp4.

        Args:
            frames: The number of frames.
            height: The height to fit them to.
            width: The width to fit them to.
            slack: Frames whose shape differs by fewer pixels of a side are resized without being cropped.
            step: The difference between permitted lengths, to suggest a shorter one if the video has fewer frames.

        Raises:
            InvalidRequest: The video has fewer frames.
        """
        fit = ",".join([*self._fit(height, width, slack), COLOURS])
        options = ["-frames:v", str(frames), "-fps_mode", "cfr", "-vf", fit, *H264.split(), *_FINE.split()]
        mp4, count = self._decode([*options, *_TARGET.split()])
        if count < frames:
            nearest = max(1, frames - -(-(frames - count) // step) * step)
            raise InvalidRequest(
                f"the video has {count} frames, but num_frames is {frames}; the nearest that works is {nearest}", VIDEO
            )
        return mp4

    def convert(self, *, height: int, width: int, slack: int, fps: float) -> tuple[bytes, int]:
        """Return the whole video with its sound, as an mp4 of another size and rate, and its number of frames.

        Frames and sound begin together, even if one of them begins later in the file.

        Raises:
            InvalidRequest: The video is too long.
        """
        most = int(self._limits.seconds * fps)
        sound = ["-map", "0:a:0?", "-ac", "2", "-af", "aresample=async=1:first_pts=0", *AAC.split()]
        for ending in ("", ":eof_action=pass"):  # A frame that lasts for less than half of one of the new rate.
            fit = ",".join([f"fps={fps:g}:start_time=0{ending}", *self._fit(height, width, slack), COLOURS])
            options = ["-frames:v", str(most + 1), "-vf", fit, *H264.split(), *sound]
            mp4, count = self._decode([*options, *_TARGET.split()], least=0 if not ending else 1)
            if count:
                break
        if count > most:
            raise InvalidRequest(f"the video lasts more than {self._limits.seconds:g} s; cut it first", VIDEO)
        return mp4, count

    def _fit(self, height: int, width: int, slack: int) -> list[str]:
        """Return the filters that bring frames to a size as `wan_tpu.media.image.fit_image` does an image."""
        size, crop = f"{width}:{height}", ""
        if not has_shape(Image.new("1", self.size[::-1]), height, width, slack):
            size, crop = f"{size}:force_original_aspect_ratio=increase", f",crop={width}:{height}"
        return [SQUARE, f"scale={size}:flags=lanczos{crop},setsar=0", *self._to_sdr]

    def _run(self, options: list[str]) -> "subprocess.CompletedProcess[bytes]":
        """Run ffmpeg on the file. Without options, ffmpeg only describes the file's content."""
        # ffmpeg can read only this file. Anything that a playlist in it refers to is neither opened nor fetched.
        source = f"-protocol_whitelist fd -max_pixels {self._limits.pixels} -threads 1 -fd {self._scratch} -i fd:"
        level = "error" if options else "info"
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-v", level, "-filter_threads", "1", *source.split()]
        os.lseek(self._scratch, 0, os.SEEK_SET)
        return subprocess.run(
            [*command, *options],
            pass_fds=[self._scratch],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (self._limits.cpu_s, self._limits.cpu_s)),
        )

    def _decode(self, options: list[str], *, least: int = 1) -> tuple[bytes, int]:
        """Run ffmpeg on the frames; return its output and the number of frames, which must be `least` or more."""
        done = self._run(["-map", "0:V:0?", *options])
        counts = _FRAMES.findall(done.stderr)
        if done.returncode < 0:
            raise InvalidRequest(
                "the video needs more memory or time to decode than the service allows; send a smaller or shorter one",
                VIDEO,
            )
        if done.returncode or not counts or int(counts[-1]) < least:
            lines = _SPEAKER.sub("", _PROGRESS.sub(b"", done.stderr).decode(errors="replace")).split("\n")
            message = next((line.strip() for line in lines if line.strip()), "it has no frames")
            raise InvalidRequest(
                f"the video can't be read ({message[:200]}); send an mp4 or another format that ffmpeg reads, with "
                f"at most {self._limits.pixels} pixels a frame",
                VIDEO,
            )
        return done.stdout, int(counts[-1])
