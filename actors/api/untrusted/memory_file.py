"""Files without a name, which can be passed to the processes that read them.

They are in memory, since constant writes to a disk would delay the database's commits.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any


@contextlib.contextmanager
def open_memory_file(content: bytes = b"", count: Callable[[int], None] = lambda size: None) -> Iterator[IO[bytes]]:
    """Open a nameless file in memory with a content. `count` is called with the size of each write, and may raise."""
    linux = hasattr(os, "memfd_create")
    descriptor = os.memfd_create("body") if linux else os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)
    with _Counted(descriptor, count) as file:
        file.write(content)
        yield file


class _Counted(io.BufferedRandom):
    """A file that reports the size of each write before it happens."""

    def __init__(self, descriptor: int, count: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(descriptor, "r+b"))
        self._count = count

    def write(self, content: Any) -> int:
        self._count(len(content))
        return super().write(content)
