"""Read the boxes of an mp4, and adjust them when other boxes are put before them."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

FREE = struct.pack(">I4s", 8, b"free")  # An empty box, which players skip anywhere in a file.
HEADER = struct.Struct(">I4s")  # A box begins with its length and its kind.
_TO_OFFSETS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")  # The path from the file to its samples' offsets.
_FIELDS = {b"stsd": 8, b"avc1": 78}  # Bytes of other content before the boxes inside a box.


class Box(NamedTuple):
    """A box: its kind, where it begins, where its content begins, and where both end."""

    kind: bytes
    start: int
    content: int
    stop: int


def list_boxes(data: bytes | bytearray, start: int = 0, stop: int | None = None) -> Iterator[Box]:
    """Yield the boxes in order; the last one may end beyond the data. Yield nothing if the data isn't an mp4."""
    stop = len(data) if stop is None else stop
    while start + HEADER.size <= stop:
        size, kind = HEADER.unpack_from(data, start)
        if size < HEADER.size:
            return
        yield Box(kind, start, start + HEADER.size, start + size)
        start += size


def shift_samples(head: bytes, by: int) -> bytes:
    """Return the beginning of an mp4, up to its samples, adjusted for `by` more bytes in front of it."""
    data = bytearray(head)
    for table in _find_offsets(data, 0, len(data), _TO_OFFSETS):
        number = struct.Struct(">I" if table.kind == b"stco" else ">Q")
        [count] = struct.unpack_from(">I", data, table.content + 4)
        for place in range(table.content + 8, table.content + 8 + count * number.size, number.size):
            number.pack_into(data, place, number.unpack_from(data, place)[0] + by)
    return bytes(data)


def find_box(data: bytes | bytearray, *path: bytes) -> Box | None:
    """Return the first box under a path of kinds, if there is one."""
    start, stop, inner = 0, len(data), None
    for kind in path:
        inner = next((box for box in list_boxes(data, start, stop) if box.kind == kind), None)
        if inner is None:
            return None
        start, stop = inner.content + _FIELDS.get(kind, 0), inner.stop
    return inner


def read_track(head: bytes) -> tuple[int, bytes] | None:
    """Return the time units per second and the decoder's settings of a file with only H.264; None for others."""
    index = find_box(head, b"moov")
    header = find_box(head, b"moov", b"trak", b"mdia", b"mdhd")
    settings = find_box(head, *_TO_OFFSETS, b"stsd", b"avc1", b"avcC")
    if index is None or header is None or settings is None:
        return None
    if sum(box.kind == b"trak" for box in list_boxes(head, index.content, index.stop)) != 1:
        return None
    is_long = head[header.content] == 1  # The version, which determines the length of the preceding times.
    [units] = struct.unpack_from(">I", head, header.content + (20 if is_long else 12))
    return units, head[settings.content : settings.stop]


def shift_times(fragment: bytes, by: int) -> bytes:
    """Return a fragment of a file with one track, delayed by that many units of time."""
    data = bytearray(fragment)
    time = find_box(data, b"moof", b"traf", b"tfdt")
    assert time is not None
    number = struct.Struct(">Q" if data[time.content] == 1 else ">I")
    number.pack_into(data, time.content + 4, number.unpack_from(data, time.content + 4)[0] + by)
    return bytes(data)


def _find_offsets(data: bytearray, start: int, stop: int, path: tuple[bytes, ...]) -> Iterator[Box]:
    for box in list_boxes(data, start, stop):
        if path and box.kind == path[0]:
            yield from _find_offsets(data, box.content, box.stop, path[1:])
        elif not path and box.kind in (b"stco", b"co64"):
            yield box
