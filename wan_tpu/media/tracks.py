"""Read the tracks of an mp4 from its header."""

import struct
from dataclasses import dataclass

from wan_tpu.media.boxes import Box, find_box, list_boxes, remove_boxes

_VIDEO, _SOUND = b"vide", b"soun"
_ENTRY = (b"mdia", b"minf", b"stbl", b"stsd")  # The path from a track to the description of its samples.
# The bytes of AAC's settings that state the encoder's buffer and bit rates, which a decoder doesn't need.
_BIT_RATES = slice(19, 30)
_MOVIE_UNITS = 1000


@dataclass(frozen=True)
class Track:
    """What the header of a file says of a track.

    Attributes:
        number: Its number in the file.
        units: Its units of time per second. A unit of sound is a sample.
        start: The time of the track at which the file begins to be shown. What precedes is only decoded.
        channels: Channels of sound; 0 for frames.
        settings: The decoder's settings.
    """

    number: int
    units: int
    start: int
    channels: int
    settings: bytes


@dataclass(frozen=True)
class Tracks:
    """The tracks of a file: H.264, and AAC if it has sound."""

    video: Track
    sound: Track | None


def read_tracks(head: bytes) -> Tracks | None:
    """Return the tracks of a file with one of H.264 and at most one of AAC; None for other files."""
    index = find_box(head, b"moov")
    tracks: dict[bytes, Track] = {}
    for box in list_boxes(head, index.content, index.stop) if index is not None else ():
        if box.kind == b"trak":
            kind, track = _read_track(head, box)
            if track is None or kind in tracks:
                return None
            tracks[kind] = track
    return Tracks(tracks[_VIDEO], tracks.get(_SOUND)) if _VIDEO in tracks else None


def normalise_header(head: bytes, start: int) -> bytes:
    """Return a header without what differs between packets that are encoded and packets that are copied.

    These are the bit rates, and the unit of the whole file's duration, which fragmented files leave out.

    Args:
        head: The header.
        start: The time of the frames' track at which the file begins to be shown.
    """
    data = bytearray(remove_boxes(head, b"btrt"))
    index, movie = find_box(data, b"moov"), find_box(data, b"moov", b"mvhd")
    assert index is not None and movie is not None
    struct.pack_into(">I", data, movie.content + 12, _MOVIE_UNITS)
    for box in list_boxes(data, index.content, index.stop):
        if box.kind == b"trak" and find_box(data, *_ENTRY, b"avc1", inside=box) is not None:
            edits = find_box(data, b"edts", b"elst", inside=box)
            assert edits is not None
            struct.pack_into(">i", data, edits.content + 12, start)
        settings = find_box(data, *_ENTRY, b"mp4a", b"esds", inside=box) if box.kind == b"trak" else None
        if settings is not None:
            data[settings.content : settings.stop] = _clear_bit_rates(data[settings.content : settings.stop])
    return bytes(data)


def _read_track(head: bytes, trak: Box) -> tuple[bytes, Track | None]:
    """Return the kind of a track, and the track if it is H.264 or AAC, and shown without a pause."""
    fields = {}
    for path in ((b"tkhd",), (b"edts", b"elst"), (b"mdia", b"mdhd"), (b"mdia", b"hdlr")):
        box = find_box(head, *path, inside=trak)
        # Version 0 has times of 32 bits, which suffice for our files.
        if box is None or head[box.content] != 0:
            return b"", None
        fields[path[-1]] = box.content
    kind = head[fields[b"hdlr"] + 8 : fields[b"hdlr"] + 12]
    entry = find_box(head, *_ENTRY, b"mp4a" if kind == _SOUND else b"avc1", inside=trak)
    settings = find_box(head, b"esds" if kind == _SOUND else b"avcC", inside=entry) if entry is not None else None
    [edits] = struct.unpack_from(">I", head, fields[b"elst"] + 4)
    if entry is None or settings is None or edits != 1:
        return kind, None
    [number] = struct.unpack_from(">I", head, fields[b"tkhd"] + 12)
    [start] = struct.unpack_from(">i", head, fields[b"elst"] + 12)
    [units] = struct.unpack_from(">I", head, fields[b"mdhd"] + 12)
    content = head[settings.content : settings.stop]
    if kind != _SOUND:
        return kind, Track(number, units, start, 0, content)
    [channels] = struct.unpack_from(">H", head, entry.content + 16)
    return kind, Track(number, units, start, channels, _clear_bit_rates(content))


def _clear_bit_rates(settings: bytes | bytearray) -> bytes:
    cleared = bytearray(settings)
    cleared[_BIT_RATES] = bytes(_BIT_RATES.stop - _BIT_RATES.start)
    return bytes(cleared)
