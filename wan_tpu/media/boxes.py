"""Find the boxes of an mp4, and adjust them when other boxes are put before them."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

FREE = struct.pack(">I4s", 8, b"free")  # An empty box, which players skip anywhere in a file.
HEADER = struct.Struct(">I4s")  # A box begins with its length and its kind.
_TO_OFFSETS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")  # The path from the file to its samples' offsets.


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


def split_header(fragment: bytes) -> tuple[bytes, bytes]:
    """Return what precedes a fragment's `moof`, which is empty or a file's header, and the rest."""
    start = next((box.start for box in list_boxes(fragment) if box.kind == b"moof"), 0)
    return fragment[:start], fragment[start:]


def shift_samples(head: bytes, by: int) -> bytes:
    """Return the beginning of an mp4, up to its samples, adjusted for `by` more bytes in front of it."""
    data = bytearray(head)
    for table in _find_offsets(data, 0, len(data), _TO_OFFSETS):
        number = struct.Struct(">I" if table.kind == b"stco" else ">Q")
        [count] = struct.unpack_from(">I", data, table.content + 4)
        for place in range(table.content + 8, table.content + 8 + count * number.size, number.size):
            number.pack_into(data, place, number.unpack_from(data, place)[0] + by)
    return bytes(data)


def make_box(kind: bytes, *contents: bytes | bytearray) -> bytes:
    """Return a box of the given contents, one after the other."""
    return HEADER.pack(HEADER.size + sum(map(len, contents)), kind) + b"".join(contents)


def _find_offsets(data: bytearray, start: int, stop: int, path: tuple[bytes, ...]) -> Iterator[Box]:
    for box in list_boxes(data, start, stop):
        if path and box.kind == path[0]:
            yield from _find_offsets(data, box.content, box.stop, path[1:])
        elif not path and box.kind in (b"stco", b"co64"):
            yield box
