"""Read the packets of videos, and write them as the fragments of an mp4 or as a file. Nothing is encoded.

A packet is a frame, or `PACKET` samples of sound.
"""

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
from av.container import InputContainer, OutputContainer
from av.stream import Disposition

from wan_tpu.errors import InvalidRequest, OutputError, Unavailable
from wan_tpu.media.boxes import split_header
from wan_tpu.media.encoding import exact_rate
from wan_tpu.sources.disk import is_permanent

PACKET = 1024  # A packet of AAC lasts for so many samples of sound.
VIDEO, SOUND = "video", "audio"  # PyAV's names of the kinds of streams.
_READ = {"skip_frame": "all"}  # By itself, PyAV decodes frames of each file that it opens, to describe it.
_WRITTEN = {"fflags": "+bitexact", "movie_timescale": "1000"}  # No file says which version wrote it.
# The header is written with the first packets, when it is known by how much the frames' times precede the video.
_FRAGMENTED = "frag_custom+delay_moov+default_base_moof+skip_trailer"
# Times are written as they are.
_LATER = {"movflags": f"{_FRAGMENTED}+frag_discont", "use_editlist": "0", "avoid_negative_ts": "disabled"}


def count_packets(frames: int, sound_rate: int, fps: float | Fraction) -> int:
    """Return how many packets of a file's sound precede the end of so many of its frames."""
    rate = fps if isinstance(fps, Fraction) else exact_rate(fps)
    return round(frames / rate * sound_rate / PACKET)


class Packet(NamedTuple):
    """A packet.

    Attributes:
        kind: `VIDEO` or `SOUND`.
        content: The encoded bytes.
        decoded_at: When it is decoded, in the unit of its track.
        shown_at: When it is shown or heard, likewise.
        lasts: For how long, likewise.
        is_key: Whether it is decoded without others.
    """

    kind: str
    content: bytes
    decoded_at: int
    shown_at: int
    lasts: int
    is_key: bool

    def delay(self, by: int) -> "Packet":
        """Return the packet at a later time."""
        return self._replace(decoded_at=self.decoded_at + by, shown_at=self.shown_at + by)


class Fragment(NamedTuple):
    """Packets that become a fragment of an mp4.

    Attributes:
        header: The mp4's header, from `make_header`.
        number: The fragment's number in the mp4. The first one, 1, includes the header.
        packets: Those of each track in the order in which they are decoded.
        leads: How long before the video's beginning decoding begins, in the unit of each kind's track.
    """

    header: bytes
    number: int
    packets: list[Packet]
    leads: Mapping[str, int]

    def write(self) -> bytes:
        """Return the fragment's bytes."""
        content, options, packets = io.BytesIO(), {"movflags": _FRAGMENTED}, self.packets
        if self.number > 1:
            options = _LATER | {"fragment_index": str(self.number)}
            packets = [packet.delay(self.leads[packet.kind]) for packet in packets]
        with av.open(content, "w", format="mp4", options=_WRITTEN | options) as file:
            _write(file, self.header, packets)
        return content.getvalue() if self.number == 1 else split_header(content.getvalue())[1]


class Track(NamedTuple):
    """What must be equal in two files whose packets are to form one stream.

    Attributes:
        codec: The codec's name.
        unit: The unit of time, in seconds.
        shape: (width, height) in pixels; of sound, samples per second and channels.
        settings: The decoder's settings.
    """

    codec: str
    unit: Fraction
    shape: tuple[int, int]
    settings: bytes


@contextlib.contextmanager
def open_media(source: Path | bytes) -> Iterator[InputContainer]:
    """Open a file, or its content. No frame is decoded, unless the decoder's `skip_frame` is changed.

    Raises:
        InvalidRequest: It can't be read as a video, also within the block.
        Unavailable: The disk or the machine fails, also within the block.
    """
    name = f"of {len(source)} bytes" if isinstance(source, bytes) else str(source)
    try:
        # A relative path with a colon would be read as a protocol.
        place = io.BytesIO(source) if isinstance(source, bytes) else str(source.absolute())
        with av.open(place, "r", options=_READ) as file:
            yield file
    except av.error.FFmpegError as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and not is_permanent(error)):
            reason = f"video {name} can't be read now ({error.strerror}); check the disk and this machine's memory"
            raise Unavailable(reason) from None
        reason = f"video {name} can't be read ({error.strerror}); give an mp4, or what else ffmpeg reads"
        raise InvalidRequest(reason, "video") from None


def find_streams(file: InputContainer) -> dict[str, Any]:
    """Return a file's first video and first sound, by their kinds; either may be missing."""
    streams: dict[str, Any] = {}
    for stream in file.streams:
        if stream.type in (VIDEO, SOUND) and not stream.disposition & Disposition.attached_pic:
            streams.setdefault(stream.type, stream)
    return streams


def read_tracks(file: InputContainer) -> dict[str, Track]:
    """Return the tracks of a file's first video and first sound, by their kinds."""
    tracks = {}
    for kind, stream in find_streams(file).items():
        codec = stream.codec_context
        shape = (codec.width, codec.height) if kind == VIDEO else (codec.sample_rate, codec.channels)
        tracks[kind] = Track(codec.name, stream.time_base, shape, bytes(codec.extradata or b""))
    return tracks


def read_packets(file: InputContainer, kinds: Sequence[str] = (VIDEO, SOUND)) -> Iterator[Packet]:
    """Yield the packets of a file's first video and first sound in the file's order, in little memory."""
    wanted = [stream for kind, stream in find_streams(file).items() if kind in kinds]
    for packet in file.demux(wanted):
        if packet.stream in wanted and packet.dts is not None and packet.pts is not None:
            times = packet.dts, packet.pts, packet.duration or 0
            yield Packet(packet.stream.type, bytes(packet), *times, packet.is_keyframe)


def make_header(file: InputContainer, sound_rate: int | None = None) -> bytes:
    """Return the header of an mp4 with the tracks of a file.

    Args:
        file: A file with video.
        sound_rate: Samples per second of stereo sound, where the file has none.
    """
    content = io.BytesIO()
    with av.open(content, "w", format="mp4", options=_WRITTEN | {"movflags": "empty_moov"}) as header:
        _add_streams(header, find_streams(file))
        if sound_rate is not None:
            header.add_stream("aac", rate=sound_rate, layout="stereo")
        header.start_encoding()
    return content.getvalue()


def write_file(path: Path, header: bytes, packets: Iterable[Packet]) -> None:
    """Write packets as an mp4 that can be played before it is complete; raises `OutputError` if the disk fails."""
    try:
        with av.open(str(path.absolute()), "w", format="mp4", options=_WRITTEN | {"movflags": "faststart"}) as file:
            _write(file, header, packets)
    except av.error.FFmpegError as error:
        raise OutputError(f"{path} can't be written ({error.strerror}); check the disk") from None


def _write(file: OutputContainer, header: bytes, packets: Iterable[Packet]) -> None:
    with open_media(header) as template:
        streams = _add_streams(file, find_streams(template))
        for packet in packets:
            written = av.Packet(packet.content)
            written.stream = stream = streams[packet.kind]
            written.time_base, written.is_keyframe = stream.time_base, packet.is_key
            written.dts, written.pts, written.duration = packet.decoded_at, packet.shown_at, packet.lasts
            file.mux(written)


def _add_streams(file: OutputContainer, templates: Mapping[str, Any]) -> dict[str, Any]:
    streams = {}
    for kind, template in templates.items():
        streams[kind] = file.add_stream_from_template(template)
        streams[kind].codec_context.bit_rate = 0  # A fragment knows no other bit rate than its own.
    return streams
