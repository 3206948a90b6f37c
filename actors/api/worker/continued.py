"""The fragments of a video that continues another one: those of the source at once, then those of the new part."""

import asyncio

from actors.api.worker.fragments import Fragments
from actors.engine import Fragment
from wan_tpu.errors import WanTpuError
from wan_tpu.media.fragments import ContinuedVideo, NotContinued


class ContinuedFragments:
    """Passes on the fragments of the whole video, which are those of the source and of the new part."""

    def __init__(self, whole: ContinuedVideo, fragments: Fragments) -> None:
        """Pass on the fragments of the source.

        Args:
            whole: The source.
            fragments: Takes all fragments.
        """
        self._whole, self._fragments = whole, fragments
        self._run = -1
        self._begin(0)

    def add(self, fragment: Fragment) -> None:
        """Take the next fragment of the new part. Any thread may call this."""
        self._begin(fragment.run)
        try:
            content = self._whole.append(fragment.content)
        except NotContinued as error:
            self._fragments.refuse(str(error))
            return
        self._fragments.add(Fragment(fragment.run, len(self._whole.fragments) + fragment.index, content))

    def _begin(self, run: int) -> None:
        """Pass on the source's fragments again, because every run of a decoder must begin with them."""
        if run > self._run:
            self._run = run
            for index, content in enumerate(self._whole.fragments):
                self._fragments.add(Fragment(run, index, content))


async def continue_fragments(source: bytes, frames: int, fps: float, fragments: Fragments) -> ContinuedFragments | None:
    """Return a receiver for fragments that continue a source video; None if the two can't form one stream."""
    try:
        whole = await asyncio.to_thread(ContinuedVideo, source, frames, fps)
    except (NotContinued, WanTpuError):
        return None  # Clients that watch get the finished video instead.
    return ContinuedFragments(whole, fragments)
