"""Read the boxes of an mp4, and adjust them when other boxes are put before them."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

FREE = struct.pack(">I4s", 8, b"free")  # An empty box, which players skip anywhere in a file.
HEADER = struct.Struct(">I4s")  # A box begins with its length and its kind.
_TO_OFFSETS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")  # The path from the file to its samples' offsets.
_FIELDS = {b"stsd": 8, b"avc1": 78, b"mp4a": 28}  # Bytes of other content before the boxes inside a box.
_INDEX = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl", *_FIELDS})  # Boxes of an index that have boxes inside.


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


def find_box(data: bytes | bytearray, *path: bytes, inside: Box | None = None) -> Box | None:
    """Return the first box under a path of kinds, which begins at the file or inside a box, if there is one."""
    for kind in path:
        start, stop = 0, len(data)
        if inside is not None:
            start, stop = inside.content + _FIELDS.get(inside.kind, 0), inside.stop
        inside = next((box for box in list_boxes(data, start, stop) if box.kind == kind), None)
        if inside is None:
            return None
    return inside


def make_box(kind: bytes, *contents: bytes | bytearray) -> bytes:
    """Return a box of the given contents, one after the other."""
    return HEADER.pack(HEADER.size + sum(map(len, contents)), kind) + b"".join(contents)


def remove_boxes(data: bytes, kind: bytes) -> bytes:
    """Return the boxes of a header without those of one kind at any depth."""
    boxes = []
    for box in list_boxes(data):
        content = data[box.content : box.stop]
        if box.kind in _INDEX:
            fields = _FIELDS.get(box.kind, 0)
            content = content[:fields] + remove_boxes(content[fields:], kind)
        if box.kind != kind:
            boxes.append(make_box(box.kind, content))
    return b"".join(boxes)


def _find_offsets(data: bytearray, start: int, stop: int, path: tuple[bytes, ...]) -> Iterator[Box]:
    for box in list_boxes(data, start, stop):
        if path and box.kind == path[0]:
            yield from _find_offsets(data, box.content, box.stop, path[1:])
        elif not path and box.kind in (b"stco", b"co64"):
            yield box
