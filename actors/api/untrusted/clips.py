"""Read an untrusted video in the process that parses uploads: ffmpeg decodes it there, within the process's limits."""

import functools
import mmap
import os
import resource
import subprocess
from collections.abc import Callable, Sequence

import imageio_ffmpeg
from PIL import Image

from actors.api.untrusted.reader_limits import ReaderLimits
from actors.api.untrusted.references import VIDEO
from wan_tpu.errors import InvalidRequest
from wan_tpu.media.encoding import exact_rate
from wan_tpu.media.shown import Fit, ShownVideo, decode_sound
from wan_tpu.reference import FPS, SECONDS

# At this quality the loss makes no difference to a model; files are 1.5 times as large as those of finished videos.
_FINE = "-crf 8"
_WAV, _WAV_HEADER = "-c:a pcm_f32le -f wav pipe:1", 128  # Bytes of a header without samples, at most.
# At most: two channels at the highest usual rate, or a soundtrack of a minute at 48 kHz. Readers hold it in memory.
_WAV_BYTES = SECONDS * 192_000 * 2 * 4
# The mp4 is fragmented, since a pipe can't be rewound to complete the header. The first frame is still shown at 0.
_TARGET = "-f mp4 -movflags frag_keyframe+delay_moov+default_base_moof pipe:1"


class _File:
    """A client's file, in a seekable file in memory."""

    def __init__(self, content: bytes, limits: ReaderLimits, scratch: int, field: str) -> None:
        """Write the file into one of the process's scratch files.

        Args:
            scratch: Its descriptor. Only the same content may be written into it again, since it shrinks to its size.
            field: The name of the field that the content came in.

        Raises:
            InvalidRequest: It is empty or too large.
        """
        self._limits, self._field, self._scratch = limits, field, scratch
        self._subject = "the video" if field == VIDEO else "a reference"
        most = os.fstat(scratch).st_size
        if len(content) > most:
            raise InvalidRequest(f"{self._subject} has more than {most} bytes; shrink it first", field)
        if not content:
            raise InvalidRequest(f"{self._subject} is empty; send an mp4 or another format that ffmpeg reads", field)
        # This process may not write to files, but it may shrink a file and map it into memory.
        os.ftruncate(scratch, len(content))
        with mmap.mmap(scratch, len(content)) as memory:
            memory[:] = content

    def _run(self, mp4: bytes | None, options: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
        """Run ffmpeg on the file, or on an mp4 that this program has encoded itself."""
        # ffmpeg can read only this file. Anything that a playlist in it refers to is neither opened nor fetched.
        pixels, scratch, cpu_s = self._limits.video_pixels, self._scratch, self._limits.video_cpu_s
        source = f"-protocol_whitelist fd -max_pixels {pixels} -threads 1 -fd {scratch} -i fd:"
        if mp4 is not None:
            source = "-protocol_whitelist pipe -threads 1 -i pipe:0"
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-filter_threads", "1", *source.split()]
        os.lseek(scratch, 0, os.SEEK_SET)
        done = subprocess.run(
            [*command, *options],
            pass_fds=[scratch],
            input=mp4 or b"",
            capture_output=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s)),
        )
        if done.returncode < 0:
            raise InvalidRequest(
                f"{self._subject} needs more memory or time to decode than the service allows; send a smaller or "
                "shorter one",
                self._field,
            )
        return done


class SoundUpload(_File):
    """A client's sound, or a video of which only the sound counts."""

    def has_frames(self) -> bool:
        """Return whether the file has a video, be it one that can't be decoded. The picture of an album isn't one."""
        packet = ["-v", "error", "-map", "0:V:0", "-c", "copy", "-frames:v", "1", "-f", "null", "-"]
        return self._run(None, packet).returncode == 0

    def convert(self, seconds: float) -> bytes:
        """Return the beginning of the sound, of some seconds, as a wav of one or two channels, at its own rate."""
        target = ["-t", f"{seconds:g}", *_WAV.split()]
        try:
            done = decode_sound(
                functools.partial(self._run, None),
                "a reference that is no image or video",
                "send a PNG, an mp4 or a wav",
                target,
                least=_WAV_HEADER + 1,
            )
        except InvalidRequest as error:
            raise InvalidRequest(str(error), self._field) from None
        if len(done.stdout) > _WAV_BYTES + _WAV_HEADER:
            raise InvalidRequest("a reference's sound has too many samples a second; bring it to 48,000", self._field)
        return done.stdout


class Upload(_File):
    """A client's video."""

    def __init__(self, content: bytes, limits: ReaderLimits, scratch: int, field: str = VIDEO) -> None:
        """Decode the first frame; raises `InvalidRequest` if the file isn't a video, or is too large."""
        super().__init__(content, limits, scratch, field)
        self._shown = self._open(functools.partial(self._run, None))
        self.size = self._shown.height, self._shown.width  # (height, width) of a frame, upright.

    def cut(self, frames: int, *, height: int, width: int, slack: int, step: int) -> bytes:
        """Return the first frames in another size, without sound, as an mp4.

        Args:
            slack: Frames whose shape differs by fewer pixels of a side are resized without being cropped.
            step: The difference between permitted lengths, to suggest a shorter one if the video has fewer frames.

        Raises:
            InvalidRequest: The video has fewer frames.
        """
        target = [*_FINE.split(), *_TARGET.split()]
        mp4, count = self._shown.encode(Fit(height, width, slack), None, target, count=frames, sound=False)
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
        most, fit = int(self._limits.video_s * fps), Fit(height, width, slack)
        target = _TARGET.split()
        mp4, count = self._shown.encode(fit, exact_rate(fps), target, count=most + 1, sound=True)
        if count > most:
            raise InvalidRequest(f"the video lasts more than {self._limits.video_s:g} s; cut it first", VIDEO)
        return mp4, count

    def shorten(self, *, height: int, width: int, sound: bool) -> tuple[bytes, int]:
        """Return the beginning of the video at the rate of references, and its number of frames."""
        fit = Fit(height, width, slack=max(height, width))
        target = [*_FINE.split(), "-t", str(SECONDS), *_TARGET.split()]
        return self._shown.encode(fit, exact_rate(FPS), target, count=FPS * SECONDS, sound=sound)

    def read_end(self, mp4: bytes, frames: int) -> Image.Image:
        """Return the last frame of what `convert` returned."""
        converted = self._open(functools.partial(self._run, mp4))
        frame = converted.read_end(frames - 1)
        assert frame is not None
        return frame

    def _open(self, run: Callable[[Sequence[str]], "subprocess.CompletedProcess[bytes]"]) -> ShownVideo:
        most = self._limits.video_pixels
        return ShownVideo(
            run, "the video", f"send an mp4 or another format that ffmpeg reads, with at most {most} pixels a frame"
        )
