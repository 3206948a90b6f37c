"""How a video that is decoded chunk by chunk plays: when each chunk is available, and when it is needed."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Playback:
    """When the chunks of a video are available, in seconds from the request's arrival at idle slices."""

    first_frame_s: float  # When the first frame is decoded.
    arrivals_s: tuple[float, ...]  # When a client has each chunk.
    chunk_s: float  # How long a chunk plays.

    @property
    def start_s(self) -> float:
        """When a client that plays as soon as it has the first chunk starts to play."""
        return self.arrivals_s[0]

    @property
    def lag_s(self) -> float:
        """The longest delay of a chunk after such a client needs it, which is how long the client waits in all."""
        due = itertools.count(self.start_s, self.chunk_s)
        return max(arrival - at for arrival, at in zip(self.arrivals_s, due, strict=False))

    @property
    def interval_s(self) -> float:
        """The mean time from one chunk to the next."""
        return (self.arrivals_s[-1] - self.start_s) / max(1, len(self.arrivals_s) - 1)
