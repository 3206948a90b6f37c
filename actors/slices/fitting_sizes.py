"""Sizes of videos that are known to fit a slice's memory, so that errors can name the nearest one."""

import contextlib
import math
from collections.abc import Iterator

from wan_tpu.errors import DoesNotFit
from wan_tpu.request import ResolvedRequest

MAX_SIZES = 64  # Only the largest sizes that fit are remembered, up to this number.


class FittingSizes:
    """Heights, widths and frames that have run, or been compiled, on one host."""

    def __init__(self) -> None:
        self._sizes: set[tuple[int, int, int]] = set()

    @contextlib.contextmanager
    def track(self, request: ResolvedRequest) -> Iterator[None]:
        """Record that a request's size fits if the block succeeds.

        Raises:
            DoesNotFit: The block raised this error. Its message now names the nearest size that does fit.
        """
        size = (request.height, request.width, request.frames)
        try:
            yield
        except DoesNotFit as error:
            self._sizes.discard(size)
            remedy = "no size is known to fit so far"
            if self._sizes:
                height, width, frames = max(self._sizes, key=math.prod)
                remedy = f"the nearest that is known to fit is {width}x{height} with {frames} frames"
            size_text = f"{request.width}x{request.height} with {request.frames} frames"
            raise DoesNotFit(f"{size_text} doesn't fit the memory of this slice; {remedy} ({error})") from None
        self._sizes.add(size)
        if len(self._sizes) > MAX_SIZES:
            self._sizes.remove(min(self._sizes, key=math.prod))
