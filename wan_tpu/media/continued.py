"""Show videos that continue each other as the fragments of one file, without encoding their frames again.

The file's sound is a row of packets without gaps. Each part begins with the packet nearest to its first frame, so its
sound is early or late by at most half a packet, however many parts there are. That first packet only prepares the
decoder for the next one; it replaces the end of the sound before it, and whatever follows it is decoded exactly.
"""

import contextlib
import heapq
import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from av.container import InputContainer

from wan_tpu.errors import InvalidRequest
from wan_tpu.media.boxes import FREE, split_header
from wan_tpu.media.encoding import exact_rate
from wan_tpu.media.fragments import find_length_us
from wan_tpu.media.packets import (
    PACKET,
    SOUND,
    VIDEO,
    Fragment,
    Packet,
    count_packets,
    find_streams,
    make_header,
    open_media,
    read_packets,
    read_tracks,
)
from wan_tpu.media.sound import convert_sound
from wan_tpu.media.temporary import open_folder

# Packets of silence, by the number of channels. They are the same at every rate.
_SILENCE = {1: bytes.fromhex("01182007"), 2: bytes.fromhex("211004608c1c")}


class NotContinued(Exception):
    """Two videos can't be combined as fragments of one file."""


@dataclass(frozen=True)
class _Place:
    """A place in a file: how many fragments, frames and packets of sound precede it."""

    fragments: int = 0
    frames: int = 0
    packets: int = 0


class ContinuedVideo:
    """A video of several parts, of which the last one may still be decoded, as the fragments of one file.

    A finished part gets the same fragments, byte for byte, as it got while it was decoded. None are held.
    """

    def __init__(self, fps: float | Fraction, sound_rate: int | None = None) -> None:
        """Begin a video without parts.

        Args:
            fps: Frames per second; a fraction is exact.
            sound_rate: Samples per second of the sound of parts that will be decoded; None if they won't have any.
        """
        self._rate, self._sound_rate = fps if isinstance(fps, Fraction) else exact_rate(fps), sound_rate
        self._last: _Part | None = None  # The last part that is finished.
        self._decoding: _Part | None = None
        self._own_header = b""  # Of the fragments of the part that is being decoded.

    def add_part(self, path: Path) -> Generator[bytes, None, None]:
        """Yield the fragments of a finished part: the video that is continued, or a part that has been decoded.

        The part counts as finished once its last fragment has been taken; otherwise nothing changes.

        Args:
            path: The part, as `VideoWriter` writes it.

        Raises:
            NotContinued: It can't follow the other parts. Fragments may have been yielded before.
            Unavailable: The machine fails.
        """
        for fragment in self.read_part(path):
            yield fragment.write() if fragment.packets else FREE

    def read_part(self, path: Path) -> Generator[Fragment, None, None]:
        """Yield what `add_part` yields, as packets."""
        try:
            with contextlib.ExitStack() as opened:
                source = self._give_rate(path, opened)
                # Sound is read on its own, so that both are read in the order of their times.
                frames, sound = (opened.enter_context(open_media(source)) for _ in range(2))
                part = self._begin_part(frames)
                for packets in _cut(frames, sound, find_length_us(self._rate)):
                    yield part.append(packets)
        except InvalidRequest as error:
            raise NotContinued(str(error)) from None
        if part.is_empty:
            raise NotContinued("the video has no frames")
        self._decoding, self._last = None, part

    def finish(self) -> list[Packet]:
        """Return the end of the sound of a video whose parts are all finished; nothing if it has no sound."""
        assert self._last is not None
        return self._last.finish()

    def append(self, fragment: bytes) -> bytes:
        """Return a fragment of the part that is being decoded as a fragment of the whole file.

        With a fragment that has a header, the part begins again: its decoder was lost.

        Raises:
            NotContinued: The part can't follow the other ones.
        """
        header, samples = split_header(fragment)
        self._own_header = header or self._own_header
        try:
            with open_media(self._own_header + samples) as file:
                if self._decoding is None or header:
                    self._decoding = self._begin_part(file)
                moved = self._decoding.append(read_packets(file))
        except InvalidRequest as error:
            raise NotContinued(str(error)) from None
        return moved.write() if moved.packets else FREE

    def end_part(self) -> None:
        """Take the part whose fragments have all been appended as finished."""
        if self._decoding is not None:
            self._decoding, self._last = None, self._decoding

    def _begin_part(self, file: InputContainer) -> "_Part":
        return _Part(file, self._last, self._rate, self._sound_rate)

    def _give_rate(self, path: Path, opened: contextlib.ExitStack) -> Path:
        """Return a part; the first one with the sound's rate, if need be in a file that is removed with the stack."""
        if (rate := self._sound_rate) is None or self._last is not None:
            return path
        with open_media(path) as file:
            sound = find_streams(file).get(SOUND)
            if sound is None or sound.codec_context.sample_rate == rate:
                return path
            layout = sound.codec_context.layout.name
        converted = opened.enter_context(open_folder()) / "converted.mp4"
        convert_sound(path, converted, layout=layout, into="stereo", rate=rate)
        return converted


class _Part:
    """Turns the packets of one part into packets of the whole file.

    Attributes:
        header: That of the whole file.
        lead: How many frames before the video's beginning decoding begins; 0 before that is known.
        end: Where the next part begins, if no more packets come.
    """

    def __init__(self, file: InputContainer, before: "_Part | None", rate: Fraction, sound_rate: int | None) -> None:
        """Check that a part can follow another one.

        Args:
            file: The part, or its first fragment.
            before: The part before, if there is one.
            rate: Frames per second.
            sound_rate: Samples per second of the sound of a file that begins in silence.

        Raises:
            NotContinued: It can't follow.
        """
        own = read_tracks(file)
        self._has_sound, self._has_begun = SOUND in own, False
        if {kind: track.codec for kind, track in own.items()} | {SOUND: "aac"} != {VIDEO: "h264", SOUND: "aac"}:
            raise NotContinued("the video has other tracks than H.264 and AAC")
        if before is None:
            self.header = make_header(file, None if self._has_sound else sound_rate)
            self.lead, self._begin = 0, _Place()
        else:
            self.header, self.lead, self._begin = before.header, before.lead, before.end
        with open_media(self.header) as whole:
            tracks = read_tracks(whole)
        if own.items() - tracks.items():
            raise NotContinued("what continues the video is encoded with other settings")
        self.end: _Place = self._begin
        self._rate, self._frame = rate, 1 / (rate * tracks[VIDEO].unit)  # How long a frame lasts, in its track's unit.
        self._packets: deque[bytes] = deque()  # Packets of sound that belong to frames that haven't come.
        self._sound_rate: int | None = None
        self._silence = b""
        if SOUND in tracks:
            self._sound_rate, channels = tracks[SOUND].shape
            if tracks[SOUND].unit * self._sound_rate != 1 or channels not in _SILENCE:
                raise NotContinued("the video's sound isn't as ours")
            self._silence = _SILENCE[channels]
            # The sound of the part before may end before its frames.
            self._packets += [self._silence] * (self._count_packets() - self.end.packets)

    @property
    def is_empty(self) -> bool:
        """Whether no frame has come."""
        return self.end.frames == self._begin.frames

    def append(self, packets: Iterable[Packet]) -> Fragment:
        """Return packets of the part as packets of the whole file."""
        moved = []
        for packet in packets:
            if packet.kind == VIDEO:
                moved.append(self._move(packet))
            elif self._has_begun or packet.shown_at == -PACKET:
                self._packets.append(packet.content)
                self._has_begun = True
            else:
                raise NotContinued("the video's sound doesn't begin as ours does")
        if self._sound_rate is not None:
            count = self._count_packets() - self.end.packets
            if not self._has_sound:
                self._packets += [self._silence] * (count - len(self._packets))
            moved += self._take_packets(min(count, len(self._packets)))
        if moved:
            self.end = replace(self.end, fragments=self.end.fragments + 1)
        return Fragment(self.header, self.end.fragments, moved, {VIDEO: round(self.lead * self._frame), SOUND: PACKET})

    def finish(self) -> list[Packet]:
        """Return the end of the part's sound, which nothing follows."""
        if self._sound_rate is None:
            return []
        # A packet is heard while the next one is, because the first one only prepares the decoder.
        missing = self._count_packets() + 1 - self.end.packets
        self._packets += [self._silence] * (missing - len(self._packets))
        return self._take_packets(missing)

    def _move(self, packet: Packet) -> Packet:
        """Return a frame at its place in the whole file."""
        if packet.shown_at % self._frame:
            raise NotContinued("the video's frames don't follow each other at its rate")
        if self.is_empty:
            # Ours are decoded a frame ahead, for their B-frames. A single one isn't, but others may follow it.
            own = math.ceil(-packet.decoded_at / self._frame)
            self.lead = self.lead or max(own, 1)
            if own > self.lead:
                raise NotContinued("what continues the video is encoded with other settings")
        shown_at = round(self._begin.frames * self._frame) + packet.shown_at
        decoded_at = round((self.end.frames - self.lead) * self._frame)
        self.end = replace(self.end, frames=self.end.frames + 1)
        return packet._replace(decoded_at=decoded_at, shown_at=shown_at, lasts=round(self._frame))

    def _take_packets(self, count: int) -> list[Packet]:
        """Return the next packets of sound."""
        starts = [PACKET * (self.end.packets + index - 1) for index in range(count)]
        self.end = replace(self.end, packets=self.end.packets + len(starts))
        return [Packet(SOUND, self._packets.popleft(), start, start, PACKET, True) for start in starts]

    def _count_packets(self) -> int:
        """Return how many packets of the whole file precede the end of the frames that have come."""
        assert self._sound_rate is not None
        return count_packets(self.end.frames, self._sound_rate, self._rate)


def _cut(frames: InputContainer, sound: InputContainer, lasts_us: int) -> Iterator[list[Packet]]:
    """Yield the packets of a finished video's fragments, cut where the muxer cuts them while it is encoded.

    That is before the first packet that is decoded so much later than the first one of its kind in the fragment.

    Args:
        frames: The video.
        sound: The same video, opened again.
        lasts_us: How long a fragment lasts, in microseconds.
    """
    units = {kind: track.unit for kind, track in read_tracks(frames).items()}
    both = [read_packets(frames, [VIDEO]), read_packets(sound, [SOUND])]
    fragment: list[Packet] = []
    begins: dict[str, int] = {}
    for packet in heapq.merge(*both, key=lambda packet: packet.decoded_at * units[packet.kind]):
        begin = begins.setdefault(packet.kind, packet.decoded_at)
        if round((packet.decoded_at - begin) * units[packet.kind] * 10**6) >= lasts_us:
            yield fragment
            fragment, begins = [], {packet.kind: packet.decoded_at}
        fragment.append(packet)
    if fragment:
        yield fragment
