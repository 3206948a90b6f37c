"""The fragments of a video of several parts: those of finished parts at once, then those of the part being decoded."""

import asyncio
from collections.abc import Iterable

from actors.api.worker.fragments import Fragments
from actors.engine import Fragment
from wan_tpu.errors import WanTpuError
from wan_tpu.media.continued import ContinuedVideo, NotContinued

# Finished parts are held, because a decoder that begins again begins a new run, which must have them too.
_MAX_HELD_BYTES = 100_000_000


class ContinuedFragments:
    """Passes on the fragments of the whole video: of its finished parts, and of the segment that is being decoded.

    The engine counts runs and fragments of each segment from 0. Here, a segment's first run continues the run that is
    under way, and each of its later ones begins a new run, with all earlier parts.
    """

    def __init__(self, whole: ContinuedVideo, fragments: Fragments) -> None:
        """Pass on the fragments of the parts that are finished already.

        Args:
            whole: The video, with the parts that precede the first segment.
            fragments: Takes all fragments.
        """
        self._whole, self._fragments = whole, fragments
        self._run = self._index = 0  # Of the next fragment that is passed on.
        self._segment_run: int | None = None  # The engine's run; None before a segment's first fragment.
        self._refused = False
        self._pass_on(whole.fragments)

    def add(self, fragment: Fragment) -> None:
        """Take the next fragment of the segment that is being decoded. Any thread may call this."""
        if self._refused:
            return
        if self._segment_run is not None and fragment.run > self._segment_run:
            self._run, self._index = self._run + 1, 0
            self._pass_on(self._whole.fragments)
        self._segment_run = fragment.run
        try:
            self._pass_on([self._whole.append(fragment.content)])
        except NotContinued as error:
            self._refuse(str(error))

    async def end_segment(self, mp4: bytes) -> None:
        """Take a finished segment, after its last fragment; the next fragment is one of the next segment.

        Of a segment that wasn't decoded here, or not streamed, all fragments are passed on now.

        Args:
            mp4: The segment.
        """
        if self._refused:
            return
        try:
            await asyncio.to_thread(self._whole.add_part, mp4)
        except (NotContinued, WanTpuError) as error:
            self._refuse(str(error))
            return
        if sum(map(len, self._whole.fragments)) > _MAX_HELD_BYTES:
            self._refuse(f"the finished parts have more than {_MAX_HELD_BYTES} bytes")
            return
        self._pass_on(self._whole.fragments[self._index :])
        self._segment_run = None

    def _pass_on(self, contents: Iterable[bytes]) -> None:
        for content in contents:
            self._fragments.add(Fragment(self._run, self._index, content))
            self._index += 1

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._whole.fragments.clear()
        self._fragments.refuse(reason)


async def continue_fragments(
    parts: Iterable[bytes], fps: float, sound_rate: int | None, fragments: Fragments
) -> ContinuedFragments | None:
    """Return a receiver for the fragments of the segments that continue a video.

    Args:
        parts: The finished parts of the video as mp4 files, in order: its source, and its earlier segments.
        fps: Frames per second.
        sound_rate: Samples per second of the segments' sound; None if they have no sound.
        fragments: Takes the fragments of the whole video.

    Returns:
        The receiver; None if the parts can't be sent in fragments. Clients that watch get the finished video then.
    """
    whole = ContinuedVideo(fps, sound_rate)
    try:
        for part in parts:
            await asyncio.to_thread(whole.add_part, part)
    except (NotContinued, WanTpuError):
        return None
    return ContinuedFragments(whole, fragments)
