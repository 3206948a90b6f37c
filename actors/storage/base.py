"""What all storage has in common: one small interface, its errors, and which names can be used.

A *name* is a relative path with forward slashes, such as "clips/cat.mp4". What is written appears whole or not at all.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from wan_tpu.errors import Unavailable

GCS_SCHEME = "gs://"
MAX_PART_BYTES = 200  # of a name between slashes: file systems allow 255, and the partial file's name is longer


class StorageError(Unavailable):
    """Something can't be read or written where it was asked for: perhaps only now, so nothing is known of content."""

    exit_code = 2


class Missing(StorageError):
    """There is nothing under that name."""


class OpenFile(Protocol):
    """Content that is read in pieces, to its end also where its name is deleted meanwhile. Close it in the end.

    In gs:// a deleted object can be read for as long as its connection lasts.
    """

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most so many and none at the end; raises `StorageError`."""

    def close(self) -> None:
        """Give it up; twice is as good as once."""


class Storage(Protocol):
    """A folder of names; every method raises `StorageError` saying which path, why, and what to do."""

    def location(self, name: str = "") -> str:
        """Return the path or gs:// address of a name (of the folder itself when left out), for people and links."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content, or its bytes from `start` to before `stop`; raises `Missing`."""

    def open(self, name: str, start: int = 0) -> "OpenFile":
        """Open the content from a byte on, to be read in pieces; raises `Missing`."""

    def size(self, name: str) -> int:
        """Return how many bytes it has; raises `Missing`."""

    def write(self, name: str, content: bytes) -> None:
        """Write the whole content or nothing, over what is there."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return names that start with `prefix`, and their sizes in bytes, sorted; hidden ones are left out."""

    def delete(self, name: str) -> None:
        """Remove a name; it is fine when nothing is there."""

    def clean(self, older_s: float) -> None:
        """Remove what writers that were killed left half written, longer ago than that: in gs:// there is nothing."""
        return

    def probe(self) -> None:
        """Write and remove a small file, so that a place that can't be written to is known before any work."""

    def free(self) -> int | None:
        """Return how many bytes can still be written; None where nobody knows an end."""
        return None

    def url(self, name: str, seconds: float, filename: str) -> str | None:
        """Return an address from which anybody can download a name for so long; None where there is none."""
        return None

    @contextlib.contextmanager
    def claim(self, names: Iterable[str]) -> Iterator[None]:
        """Hold the place for one writer of `names`, and remove what a killed one left half written.

        Only a folder can be held (the lock ends with its process, however that ends); in gs:// nothing is ever half
        written, two writers do double work but no harm, and a lock there would outlive a killed process.
        """
        yield


def check_name(name: str, *, hidden: bool = False) -> str:
    """Return a name that can be used; raises `StorageError` otherwise. hidden: as in `name_problem`."""
    problem = name_problem(name, hidden=hidden)
    if problem is not None:
        raise StorageError(f"the name {name!r} {problem}; give one such as 'clips/cat.mp4'")
    return name


def name_problem(name: str, *, hidden: bool = False) -> str | None:
    """Return why a name can't be used under a folder, or None when it can; hidden: parts may begin with a dot."""
    if not name:
        return "is empty"
    if name.startswith("/") or "\\" in name:
        return "is not a relative path with forward slashes"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}, and would leave its folder or change its meaning"
        if part.startswith(".") and not hidden:
            return f"has the part {part!r}, which would be hidden: begin it with another character than a dot"
        if len(part.encode(errors="replace")) > MAX_PART_BYTES:
            return f"has a part of more than {MAX_PART_BYTES} bytes"
    if any(not character.isprintable() for character in name):
        return "has a control character, or is no valid Unicode"
    return None
