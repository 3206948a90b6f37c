"""Join a video with the clips that continue it."""

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wan_tpu.errors import InvalidRequest, OutputError, Unavailable
from wan_tpu.media.continued import ContinuedVideo, NotContinued
from wan_tpu.media.encoding import exact_rate
from wan_tpu.media.packets import (
    SOUND,
    VIDEO,
    Fragment,
    Packet,
    Track,
    find_streams,
    open_media,
    read_tracks,
    write_file,
)
from wan_tpu.media.reading import open_video
from wan_tpu.media.shown import Fit
from wan_tpu.media.sound import convert_sound
from wan_tpu.media.temporary import open_folder
from wan_tpu.media.video import VideoWriter, check_ffmpeg

_CONVERSION_S = 6 * 3600.0  # Longer than any video takes that people continue.
_TRIAL_FRAMES = 3  # A single frame is encoded in another way.
_LEAST_ROOM = 2**20  # Bytes. Less remains only when ffmpeg has filled a disk.


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
        track: What must be equal in two files whose packets are to form one stream.
        rate: Frames per second; the average of a file whose rate varies.
        is_even: Whether its packets are exactly the frames that are shown, neither turned nor stretched, and follow
            each other at exactly that rate from the start of the file.
        frames: How many frames it has.
        sound: The format of its sound, if it has any.
    """

    path: Path
    track: Track
    rate: Fraction
    is_even: bool
    frames: int
    sound: Sound | None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.track.shape


def read_clip(path: Path) -> Clip:
    """Return the description of a video file; raises `InvalidRequest`, `Unavailable`."""
    with open_media(path) as file:
        streams, tracks = find_streams(file), read_tracks(file)
        if VIDEO not in tracks:
            raise InvalidRequest(f"video {path} has no frames; save it again as an mp4", "video")
        video, sound = streams[VIDEO], streams.get(SOUND)
        times, lasts, hides = [], 0, False
        for packet in file.demux(video):
            if packet.size:
                times.append(packet.pts if packet.pts is not None else packet.dts or 0)
                lasts, hides = packet.duration or 0, hides or packet.is_discard  # Others need a hidden frame.
        times.sort()
        # A single frame has only its duration to tell the rate.
        span, steps = (times[-1] - times[0], len(times) - 1) if len(times) > 1 else (lasts, 1)
        if span <= 0:
            raise InvalidRequest(f"video {path} has no frames that last; save it again as an mp4", "video")
        file.seek(0)
        video.codec_context.skip_frame = "DEFAULT"
        shown = next(file.decode(video), None)
        is_turned = shown is None or "DISPLAYMATRIX" in shown.side_data
        is_even = (
            not hides
            and not is_turned
            and video.sample_aspect_ratio in (None, 0, 1)
            and span % steps == 0
            and times == [index * (span // steps) for index in range(len(times))]
        )
        sound_format = None
        if sound is not None:
            codec = sound.codec_context
            sound_format = Sound(codec.name, codec.sample_rate, codec.layout.name)
        rate = Fraction(steps, span) / tracks[VIDEO].unit
        return Clip(path, tracks[VIDEO], rate, is_even, len(times), sound_format)


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
        partial = folder / "joined.mp4"
        try:
            _write(*_make_sound_alike(files, folder, cancelled), partial, cancelled)
        except NotContinued:  # Some other program has put sound beside our frames.
            every = _make_sound_alike(files, folder, cancelled, every=True)
            try:
                _write(*every, partial, cancelled)
            except NotContinued as error:
                raise OutputError(f"{output} can't be joined ({error}); check IMAGEIO_FFMPEG_EXE") from None
        os.replace(partial, output)


def _write(files: Sequence[Clip], rate: int | None, output: Path, cancelled: threading.Event | None) -> None:
    """Write the packets of files one after another as one file; `rate` is that of their sound."""
    whole = ContinuedVideo(files[-1].rate, rate)

    def list_packets(fragments: Iterable[Fragment]) -> Iterator[Packet]:
        for fragment in fragments:
            yield from fragment.packets
            if cancelled is not None and cancelled.is_set():
                raise Unavailable(f"{output} isn't wanted any more")
        yield from whole.finish()

    fragments = itertools.chain.from_iterable(whole.read_part(clip.path) for clip in files)
    first = next(fragments)
    write_file(output, first.header, list_packets(itertools.chain([first], fragments)))


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
    return all(clip.is_even and (clip.track, clip.rate) == (last.track, last.rate) for clip in files)


def _convert(video: Path, output: Path, fit: Fit, rate: Fraction, cancelled: threading.Event | None = None) -> None:
    """Write what a video shows and its sound as this program encodes them."""
    with open_video(video, timeout_s=_CONVERSION_S, cancelled=cancelled) as shown:
        shown.encode(fit, rate, ["-movflags", "+faststart", "-f", "mp4", str(output.absolute())], sound=True)


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
        path = folder / f"{index}.sound.mp4"
        with _explain_disk(folder):
            convert_sound(clip.path, path, layout=clip.sound.layout, into=layout, rate=wanted.rate, cancelled=cancelled)
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
