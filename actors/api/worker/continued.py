"""The fragments of a video that continues another one: that one's, at once, and then those of the new part."""

import asyncio

from actors.api.worker.fragments import Fragments
from actors.engine import Fragment
from wan_tpu.errors import WanTpuError
from wan_tpu.media.fragments import ContinuedVideo, NotContinued


class ContinuedFragments:
    """Passes on the fragments of the whole video."""

    def __init__(self, whole: ContinuedVideo, fragments: Fragments) -> None:
        """Pass on those of the source.

        Args:
            whole: The source.
            fragments: Takes all fragments.
        """
        self._whole, self._fragments = whole, fragments
        self._run = -1
        self._begin(0)

    def add(self, fragment: Fragment) -> None:
        """Take the next fragment of the new part, in any thread."""
        self._begin(fragment.run)
        try:
            content = self._whole.append(fragment.content)
        except NotContinued as error:
            self._fragments.refuse(str(error))
            return
        self._fragments.add(Fragment(fragment.run, len(self._whole.fragments) + fragment.index, content))

    def _begin(self, run: int) -> None:
        """Pass on the source's fragments once more when a decoder has begun again, since they are a run's first."""
        if run > self._run:
            self._run = run
            for index, content in enumerate(self._whole.fragments):
                self._fragments.add(Fragment(run, index, content))


async def continue_fragments(source: bytes, frames: int, fps: float, fragments: Fragments) -> ContinuedFragments | None:
    """Return what takes the fragments of a video that continues another one; None if the two can't be one stream."""
    try:
        whole = await asyncio.to_thread(ContinuedVideo, source, frames, fps)
    except (NotContinued, WanTpuError):
        return None  # Whoever watches gets the finished video.
    return ContinuedFragments(whole, fragments)
