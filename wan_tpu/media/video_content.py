"""A video file in memory, in which form a request carries it to processes that share no disk."""

import dataclasses
import functools
import hashlib


@dataclasses.dataclass(frozen=True)
class VideoContent:
    """The content of a video file.

    Attributes:
        content: The whole file.
    """

    content: bytes = dataclasses.field(repr=False)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def __str__(self) -> str:
        return f"of {len(self.content)} bytes, SHA-256 {self.digest[:16]}"
