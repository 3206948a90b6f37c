"""Show videos that continue each other as the fragments of one file, without encoding their frames again.

The file's sound is a row of packets without gaps. Each part begins with the packet nearest to its first frame, so its
sound is early or late by at most half a packet, however many parts there are. That first packet only prepares the
decoder for the next one; it replaces the end of the sound before it, and whatever follows it is decoded exactly.
"""

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from wan_tpu.errors import InvalidRequest
from wan_tpu.media.boxes import FREE, find_box
from wan_tpu.media.encoding import AAC, exact_rate
from wan_tpu.media.fragments import cut_video
from wan_tpu.media.samples import PACKET, delay, delay_frame, describe_packets, read_samples, write_fragment
from wan_tpu.media.tracks import Track, Tracks, normalise_header, read_tracks

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
        self._fps = self._rate = fps if isinstance(fps, Fraction) else exact_rate(fps)
        self._sound_rate = sound_rate
        self._tracks: Tracks | None = None
        self._end = _Place()
        self._decoding: _Part | None = None
        self._last: _Part | None = None

    def add_part(self, path: Path) -> Generator[bytes, None, None]:
        """Yield the fragments of a finished part: the video that is continued, or a part that has been decoded.

        The part counts as finished once its last fragment has been taken; otherwise nothing changes.

        Args:
            path: The part, as `VideoWriter` writes it.

        Raises:
            NotContinued: It can't follow the other parts. Fragments may have been yielded before.
            Unavailable: The machine fails.
        """
        part = _Part(self._tracks, self._end, self._rate)
        try:
            for content in self._cut(path):
                yield part.append(content)
        except InvalidRequest as error:
            raise NotContinued(str(error)) from None
        if part.tracks is None or part.end == self._end:
            raise NotContinued("the video has no frames")
        self._tracks, self._end, self._decoding, self._last = part.tracks, part.end, None, part

    def finish(self) -> bytes:
        """Return the last fragment of a video whose parts are all finished: the end of its sound, if it has any."""
        assert self._last is not None
        return self._last.finish()

    def append(self, fragment: bytes) -> bytes:
        """Return a fragment of the part that is being decoded as a fragment of the whole file.

        With a fragment that has a header, the part begins again: its decoder was lost.

        Raises:
            NotContinued: The part can't follow the other ones.
        """
        if self._decoding is None or find_box(fragment, b"moov") is not None:
            self._decoding = _Part(self._tracks, self._end, self._rate)
        return self._decoding.append(fragment)

    def end_part(self) -> None:
        """Take the part whose fragments have all been appended as finished."""
        if self._decoding is not None:
            self._tracks, self._end, self._decoding = self._decoding.tracks, self._decoding.end, None

    def _cut(self, path: Path) -> Iterator[bytes]:
        """Return the fragments of a part. The first part's sound gets the right rate, and is silence if it has none."""
        contents, rate = cut_video(path, self._fps), self._sound_rate
        if self._tracks is not None or rate is None:
            return contents
        if (first := next(contents, None)) is None:
            return contents
        tracks = read_tracks(first)
        if tracks is None or (tracks.sound is not None and tracks.sound.units == rate):
            return itertools.chain([first], contents)
        sound = ["-map", "0:V:0", "-map", "0:a:0", "-af", f"aresample={rate}:async=1:first_pts=0", "-ac", "2"]
        if tracks.sound is None:
            samples = (read_samples(content).get(tracks.video.number) for content in itertools.chain([first], contents))
            frames = sum(len(of_video.sizes) for of_video in samples if of_video is not None)  # Sound may end later.
            silence = f"anullsrc=r={rate}:cl=stereo,atrim=end_sample={round(frames / self._rate * rate)}"
            sound = ["-f", "lavfi", "-i", silence, "-map", "0:V:0", "-map", "1:a"]
        return cut_video(path, self._fps, [*sound, "-c:v", "copy", *AAC.split()])


class _Part:
    """Turns the fragments of one part into fragments of the whole file.

    Attributes:
        tracks: The tracks of the whole file; None before its first header.
        end: Where the next part begins, if no more fragments come.
    """

    def __init__(self, tracks: Tracks | None, begin: _Place, rate: Fraction) -> None:
        self.tracks, self.end = tracks, begin
        self._begin, self._rate = begin, rate
        self._packets: deque[bytes] = deque()  # Packets of sound that belong to frames that haven't come.
        self._has_sound = self._is_single = False

    def append(self, fragment: bytes) -> bytes:
        """Return a fragment of the part as a fragment of the whole file."""
        head = self._read_header(fragment) if find_box(fragment, b"moov") is not None else b""
        assert self.tracks is not None
        samples, moved = read_samples(fragment), []
        video, sound = self.tracks.video, self.tracks.sound
        if (frames := samples.get(video.number)) is not None:
            self.end = replace(self.end, frames=self.end.frames + len(frames.sizes))
            if self._is_single and self.end.frames > self._begin.frames + 1:
                raise NotContinued("the video's frames don't follow each other at its rate")
            frames = delay_frame(frames, video.start) if self._is_single else frames
            moved.append(delay(frames, round(self._begin.frames * video.units / self._rate)))
        if sound is not None:
            if sound.number in samples:
                self._packets += samples[sound.number].split()
            if packets := self._take_packets(sound):
                moved.append(describe_packets(packets, sound, self.end.packets * PACKET))
                self.end = replace(self.end, packets=self.end.packets + len(packets))
        if not moved:
            return FREE
        self.end = replace(self.end, fragments=self.end.fragments + 1)
        return head + write_fragment(self.end.fragments, moved)

    def finish(self) -> bytes:
        """Return the end of the part's sound, which nothing follows."""
        if self.tracks is None or (sound := self.tracks.sound) is None:
            return b""
        # A packet is heard while the next one is, because the first one only prepares the decoder.
        missing = self._count_packets(sound) + 1 - self.end.packets
        packets = [self._packets.popleft() if self._packets else _SILENCE[sound.channels] for _ in range(missing)]
        samples = describe_packets(packets, sound, self.end.packets * PACKET)
        return write_fragment(self.end.fragments + 1, [samples])

    def _read_header(self, fragment: bytes) -> bytes:
        """Check a part's header, and return that of the whole file if the file begins with this part."""
        tracks, begin = read_tracks(fragment), find_box(fragment, b"moof")
        if tracks is None or begin is None:
            raise NotContinued("the video has other tracks than H.264 and AAC")
        head = b""
        frames = read_samples(fragment).get(tracks.video.number)
        if tracks.video.start == 0 and frames is not None and len(frames.sizes) == 1:
            # The encoder shows a single frame at once, but in all other videos one frame later, for its B-frames.
            self._is_single = True
            tracks = replace(tracks, video=replace(tracks.video, start=round(tracks.video.units / self._rate)))
        if self.tracks is None:
            self.tracks, head = tracks, normalise_header(fragment[: begin.start], tracks.video.start)
        if tracks.video != self.tracks.video or tracks.sound not in (None, self.tracks.sound):
            raise NotContinued("what continues the video is encoded with other settings")
        sound, self._has_sound = self.tracks.sound, tracks.sound is not None
        if sound is not None:
            if sound.start != PACKET or sound.channels not in _SILENCE:
                raise NotContinued("the video's sound doesn't begin as ours does")
            # The sound of the part before may end before its frames.
            missing = self._count_packets(sound) - self.end.packets
            self._packets += [_SILENCE[sound.channels]] * missing
        return head

    def _take_packets(self, sound: Track) -> list[bytes]:
        """Return the packets that the frames need up to here, or fewer if more haven't come."""
        count = self._count_packets(sound) - self.end.packets
        if not self._has_sound:
            return [_SILENCE[sound.channels]] * count
        return [self._packets.popleft() for _ in range(min(count, len(self._packets)))]

    def _count_packets(self, sound: Track) -> int:
        """Return how many packets of the whole file precede the end of the frames that have come."""
        return round(self.end.frames / self._rate * sound.units / PACKET)
