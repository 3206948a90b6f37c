"""Read the samples of an mp4's fragments, and write fragments: a sample is a frame, or a packet of sound."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from wan_tpu.media.boxes import HEADER, Box, find_box, list_boxes, make_box
from wan_tpu.media.tracks import Track

PACKET = 1024  # A packet of AAC lasts for so many samples of sound.
_HAS_DELAYS = 0x800  # The flag of a box trun whose samples say how long after their decoding they are shown.
_OFFSET = 8  # Where a box trun says where its samples are.
# A packet of sound is decoded without others. Such are the flags of a sample that needs none.
_INDEPENDENT = 0x02000000
# The fields of a box tfhd that precede the default size of a sample: the flag that announces each, and its bytes.
_BEFORE_SIZE, _HAS_SIZE = ((0x1, 8), (0x2, 4), (0x8, 4)), 0x10


@dataclass(frozen=True)
class Samples:
    """The samples of one track in a fragment.

    Attributes:
        traf: The box that describes them.
        sizes: How many bytes each has.
        content: The bytes of all.
    """

    traf: bytes
    sizes: list[int]
    content: bytes

    def split(self) -> list[bytes]:
        """Return the bytes of each sample."""
        samples, start = [], 0
        for size in self.sizes:
            samples.append(self.content[start : start + size])
            start += size
        return samples


def read_samples(fragment: bytes) -> dict[int, Samples]:
    """Return the samples of a fragment, by the numbers of their tracks."""
    moof = find_box(fragment, b"moof")
    assert moof is not None
    samples = {}
    for traf in list_boxes(fragment, moof.content, moof.stop):
        if traf.kind == b"traf":
            number, default_size = _read_defaults(fragment, traf)
            run = find_box(fragment, b"trun", inside=traf)
            assert run is not None
            flags, count, offset = struct.unpack_from(">IIi", fragment, run.content)
            sizes = [default_size] * count
            if flags & 0x200:
                # What each sample says of itself: its duration if there is one, its size, and up to two more numbers.
                step = 4 * sum(bool(flags & flag) for flag in (0x100, 0x200, 0x400, 0x800))
                first = run.content + (16 if flags & 0x4 else 12) + (4 if flags & 0x100 else 0)
                sizes = [struct.unpack_from(">I", fragment, first + step * index)[0] for index in range(count)]
            start = moof.start + offset
            samples[number] = Samples(fragment[traf.start : traf.stop], sizes, fragment[start : start + sum(sizes)])
    return samples


def delay(samples: Samples, by: int) -> Samples:
    """Return samples that are shown later, by that many units of their track's time."""
    traf = bytearray(samples.traf)
    time = find_box(traf, b"traf", b"tfdt")
    assert time is not None
    number = struct.Struct(">Q" if traf[time.content] == 1 else ">I")
    number.pack_into(traf, time.content + 4, number.unpack_from(traf, time.content + 4)[0] + by)
    return Samples(bytes(traf), samples.sizes, samples.content)


def delay_frame(samples: Samples, by: int) -> Samples:
    """Return a single sample that is decoded at the same time as before, but shown later, by that many units."""
    [_] = samples.sizes
    traf = samples.traf
    run = find_box(traf, b"traf", b"trun")
    assert run is not None
    flags, *_ = struct.unpack_from(">I", traf, run.content)
    content, own_delay = traf[run.content + 4 : run.stop], 0
    if flags & _HAS_DELAYS:  # A sample's last number.
        content, own_delay = content[:-4], struct.unpack(">I", content[-4:])[0]
    run_box = make_box(b"trun", struct.pack(">I", flags | _HAS_DELAYS), content, struct.pack(">I", own_delay + by))
    before = traf[HEADER.size : run.start]
    return Samples(make_box(b"traf", before, run_box, traf[run.stop :]), samples.sizes, samples.content)


def describe_packets(packets: Sequence[bytes], track: Track, start: int) -> Samples:
    """Return packets of sound as the samples of a fragment; `start` is when they begin, in their track's time."""
    sizes = [len(packet) for packet in packets]
    header = make_box(b"tfhd", struct.pack(">IIII", 0x20028, track.number, PACKET, _INDEPENDENT))
    time = make_box(b"tfdt", struct.pack(">IQ", 0x01000000, start))
    run = make_box(b"trun", struct.pack(f">III{len(sizes)}I", 0x201, len(sizes), 0, *sizes))
    return Samples(make_box(b"traf", header, time, run), sizes, b"".join(packets))


def write_fragment(number: int, tracks: Sequence[Samples]) -> bytes:
    """Return a fragment of the given samples of each track; `number` counts the fragments of a file."""
    sequence = make_box(b"mfhd", struct.pack(">II", 0, number))
    offset = HEADER.size + len(sequence) + sum(len(samples.traf) for samples in tracks) + HEADER.size
    boxes = [sequence]
    for samples in tracks:
        traf = bytearray(samples.traf)
        run = find_box(traf, b"traf", b"trun")
        assert run is not None
        struct.pack_into(">i", traf, run.content + _OFFSET, offset)
        offset += len(samples.content)
        boxes.append(bytes(traf))
    return make_box(b"moof", *boxes) + make_box(b"mdat", *(samples.content for samples in tracks))


def _read_defaults(fragment: bytes, traf: Box) -> tuple[int, int]:
    """Return the number of a track, and the size of those of its samples that don't say their own."""
    header = find_box(fragment, b"tfhd", inside=traf)
    assert header is not None
    flags, number = struct.unpack_from(">II", fragment, header.content)
    size = header.content + 8 + sum(length for flag, length in _BEFORE_SIZE if flags & flag)
    return number, struct.unpack_from(">I", fragment, size)[0] if flags & _HAS_SIZE else 0
