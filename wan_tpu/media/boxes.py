"""Boxes of an mp4, and what changes in them when bytes are sent before them."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

FREE = struct.pack(">I4s", 8, b"free")  # An empty box, which players skip between any others of a file.
HEADER = struct.Struct(">I4s")  # A box begins with its length and its kind.
_TO_OFFSETS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")  # From the file to the places of its samples.


class Box(NamedTuple):
    """A box: its kind, where it begins, where its content begins, and where both end."""

    kind: bytes
    start: int
    content: int
    stop: int


def list_boxes(data: bytes | bytearray, start: int = 0, stop: int | None = None) -> Iterator[Box]:
    """Yield the boxes one after the other; the last one may end beyond the data. Of what is no mp4, yield nothing."""
    stop = len(data) if stop is None else stop
    while start + HEADER.size <= stop:
        size, kind = HEADER.unpack_from(data, start)
        if size < HEADER.size:
            return
        yield Box(kind, start, start + HEADER.size, start + size)
        start += size


def shift_samples(head: bytes, by: int) -> bytes:
    """Return the beginning of an mp4, up to its samples, for a file in which so many bytes come before it."""
    data = bytearray(head)
    for table in _find_offsets(data, 0, len(data), _TO_OFFSETS):
        number = struct.Struct(">I" if table.kind == b"stco" else ">Q")
        [count] = struct.unpack_from(">I", data, table.content + 4)
        for place in range(table.content + 8, table.content + 8 + count * number.size, number.size):
            number.pack_into(data, place, number.unpack_from(data, place)[0] + by)
    return bytes(data)


def _find_offsets(data: bytearray, start: int, stop: int, path: tuple[bytes, ...]) -> Iterator[Box]:
    for box in list_boxes(data, start, stop):
        if path and box.kind == path[0]:
            yield from _find_offsets(data, box.content, box.stop, path[1:])
        elif not path and box.kind in (b"stco", b"co64"):
            yield box
