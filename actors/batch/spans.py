"""A batch's latest spans, and the timeline drawn from them."""

import threading
from collections import deque
from collections.abc import Callable

from actors.observe.span import Span
from wan_tpu.storage.base import Storage, StorageError

MAX_SPANS = 10_000  # Spans kept of a batch of any length: 6 MB, about 200 videos, drawn within half a minute.


class LatestSpans:
    """The latest spans of a batch. They may be added from any thread."""

    def __init__(self, capacity: int = MAX_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._total = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, span: Span) -> None:
        """Keep a span of work that has ended, and drop the oldest one if there are too many."""
        if span.kind == "compiling":
            return
        with self._lock:
            self._spans.append(span)
            self._total += 1

    def save(self, output: Storage, tell: Callable[[str], object]) -> None:
        """Draw timeline.png and timeline.trace.json. This takes a while, so don't keep slices waiting for it.

        Args:
            tell: Called if the files cover only part of the batch or can't be written; neither fails the batch.
        """
        from actors.observe.timeline_picture import save  # Takes a second, so only if pictures are wanted.

        spans, title = list(self._spans), "When each slice computes"
        if not spans:
            return
        if self._total > len(spans):
            title = f"{title}: the last {len(spans):,} spans of {self._total:,}"
            tell(f"the timeline is of the last {len(spans):,} spans of {self._total:,}")
        try:
            save(output, spans, title)
        except StorageError as error:
            tell(f"the timeline can't be written: {error}")
