"""How a video plays that is decoded chunk after chunk: when each chunk is there, and when it is needed."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Playback:
    """When the chunks of a video are there, in seconds from the request's arrival at idle slices.

    Attributes:
        first_frame_s: When the first frame is decoded.
        arrivals_s: When a client has each chunk.
        chunk_s: How long a chunk plays.
    """

    first_frame_s: float
    arrivals_s: tuple[float, ...]
    chunk_s: float

    @property
    def start_s(self) -> float:
        """When a client begins to play that starts as soon as it has the first chunk."""
        return self.arrivals_s[0]

    @property
    def lag_s(self) -> float:
        """How much later than such a client needs it the latest chunk is there: how long it waits, in all."""
        due = itertools.count(self.start_s, self.chunk_s)
        return max(arrival - at for arrival, at in zip(self.arrivals_s, due, strict=False))

    @property
    def interval_s(self) -> float:
        """The mean time from one chunk to the next."""
        return (self.arrivals_s[-1] - self.start_s) / max(1, len(self.arrivals_s) - 1)
