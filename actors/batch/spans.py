"""The timeline of a batch: its latest spans, and the files that are drawn of them."""

import threading
from collections import deque
from collections.abc import Callable

from actors.observe.span import Span
from wan_tpu.storage.base import Storage, StorageError

MAX_SPANS = 10_000  # A batch of any length keeps so many: 6 MB, about 200 videos, drawn within half a minute.


class LatestSpans:
    """The latest spans of a batch, told from any thread."""

    def __init__(self, most: int = MAX_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._total = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, span: Span) -> None:
        """Keep a span, in place of the oldest one where there are too many."""
        with self._lock:
            self._spans.append(span)
            self._total += 1

    def save(self, output: Storage, tell: Callable[[str], object]) -> None:
        """Draw timeline.png and timeline.trace.json, which takes a while: not while slices are held for it.

        Args:
            output: Where the files go.
            tell: Is told where they are of a part of the batch, or can't be written: neither fails the batch.
        """
        from actors.observe.timeline_picture import save  # a second, and only for who wants pictures

        spans, title = list(self._spans), "When each slice computes"
        if not spans:
            return
        if self._total > len(spans):
            title = f"{title}: the last {len(spans):,} spans of {self._total:,}"
            tell(f"the timeline is of the last {len(spans):,} spans of {self._total:,}")
        try:
            save(output, spans, title)
        except StorageError as error:
            tell(f"there is no timeline: {error}")
