"""The interface of all storage, its errors, and the rules for names.

A *name* is a relative path with forward slashes, such as "clips/cat.mp4". Files appear completely or not at all.
"""

import contextlib
import os
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Protocol

from wan_tpu.errors import InvalidInput, Unavailable

MAX_PART_BYTES = 200  # The longest part between slashes. File systems allow 255, and the partial file's name is longer.
# Calls to a bucket that doesn't answer are repeated for this long, unless the environment variable says otherwise.
OUTAGE_S = 120.0
OUTAGE_VARIABLE = "WAN_TPU_STORAGE_OUTAGE_S"
CONTENT_TYPES = {".mp4": "video/mp4", ".json": "application/json", ".jsonl": "application/jsonl", ".png": "image/png"}
CONTENT_TYPES |= {".webp": "image/webp", ".jpg": "image/jpeg"}


class StorageError(Unavailable):
    """Something can't be read or written at its location, perhaps only temporarily, whatever its content is."""

    exit_code = 2


class NoSpace(StorageError):
    """The disk is full, or too little of it is left to begin anything."""


class Refused(StorageError):
    """The service refused, and would refuse the same call again: the name is wrong, or access isn't granted."""


class Missing(Refused):
    """There is nothing under that name."""


class OpenFile(Protocol):
    """Content that is read in pieces, to the end even if its name is deleted meanwhile. The caller must close it.

    In a bucket a deleted object can be read for as long as its connection lasts.
    """

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size` and none at the end; raises `StorageError`."""

    def close(self) -> None:
        """Close the content; closing it again does nothing."""


class Storage(Protocol):
    """A folder of names; every method raises `StorageError` saying which path, why, and what to do."""

    jax_can_write: ClassVar[bool] = True  # Whether JAX can keep what it compiles at such a location.

    def location(self, name: str = "") -> str:
        """Return the path or address of a name (of the folder itself when left out), for people and links."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content, or its bytes from `start` to before `stop`; raises `Missing`."""

    def open(self, name: str, start: int = 0) -> "OpenFile":
        """Open the content from a byte on, to be read in pieces; raises `Missing`."""

    def size(self, name: str) -> int:
        """Return how many bytes it has; raises `Missing`."""

    def has(self, name: str) -> bool:
        """Return whether something is there."""
        try:
            self.size(name)
        except Missing:
            return False
        return True

    def write(self, name: str, content: bytes) -> None:
        """Write the whole content or nothing, over what is there."""

    def writing(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a file to write to in pieces; it appears under its name once the block has ended without an error."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return names that start with `prefix`, and their sizes in bytes, sorted; hidden ones are left out."""

    def delete(self, name: str) -> None:
        """Remove a name; nothing happens if it doesn't exist."""

    def clean(self, older_s: float) -> None:
        """Remove partial files that killed writers left more than `older_s` seconds ago."""
        return

    def probe(self) -> None:
        """Write and remove a small file, so that a place that can't be written to is known before any work."""

    def free(self) -> int | None:
        """Return how many bytes can still be written; None if no limit is known."""
        return None

    def url(self, name: str, seconds: float, filename: str) -> str | None:
        """Return an address from which anybody can download a name for that many seconds; None if there is none."""
        return None

    @contextlib.contextmanager
    def claim(self, names: Iterable[str]) -> Iterator[None]:
        """Lock the place for one writer of `names`, and remove what a killed writer left half written.

        Only a folder can be locked (the lock ends with its process, however that ends). In a bucket nothing is ever
        half written, two writers do double work but no harm, and a lock would outlive a killed process.
        """
        yield


class StoredObject(NamedTuple):
    """An object of a bucket: its size in bytes, and a version that changes whenever it is written."""

    size: int
    version: str


class BucketStorage(Storage):
    """The objects below a prefix of a bucket: the common part of all bucket services.

    Every call that may be repeated without harm is repeated for `outage_s`, with growing pauses, on temporary errors.
    """

    scheme: ClassVar[str]
    bucket_pattern: ClassVar[re.Pattern[str]]

    def __init__(self, bucket: str, prefix: str = "") -> None:
        if not self.bucket_pattern.fullmatch(bucket):
            raise InvalidInput(f"{self.scheme}{bucket} names no bucket; give {self.scheme}bucket/prefix")
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        if self.prefix:
            check_name(self.prefix, hidden=True)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), (self.bucket, self.prefix)

    def location(self, name: str = "") -> str:
        """Return the address."""
        return self.scheme + "/".join(part for part in (self.bucket, self.prefix, name) if part)

    def key(self, name: str) -> str:
        """Return the name that an object has in its bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name

    @abstractmethod
    def stat(self, name: str) -> StoredObject:
        """Return the size and the version of the object that is there now; raises `Missing`."""

    def size(self, name: str) -> int:
        """Return the size of the object."""
        return self.stat(name).size

    @abstractmethod
    def objects(self, prefix: str = "") -> dict[str, StoredObject]:
        """Return all objects whose names start with `prefix`, including hidden ones."""

    @abstractmethod
    def read_version(self, name: str, version: str, start: int, stop: int) -> bytes:
        """Return bytes of an object in the listed version; raises `Missing` if it has changed since."""

    @abstractmethod
    def download(self, name: str, version: str, path: Path) -> None:
        """Write an object in its listed version to a file, and verify it; raises as `read_version`, or `OSError`."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return objects below the prefix."""
        hidden = re.compile(r"(^|/)\.")
        objects = self.objects(prefix)
        return {name: objects[name].size for name in sorted(objects) if not hidden.search(name)}

    def probe(self) -> None:
        """Upload and remove a hidden object."""
        name = f".probe.{uuid.uuid4().hex[:12]}"
        self.upload(name, b"probe")
        self.remove(name)

    def write(self, name: str, content: bytes) -> None:
        """Upload the object: it appears once the upload has succeeded; until then the previous content stays."""
        self.upload(check_name(name), content)

    def delete(self, name: str) -> None:
        """Remove the object."""
        with contextlib.suppress(Missing):
            self.remove(check_name(name))

    @abstractmethod
    def upload(self, name: str, content: bytes) -> None:
        """Write an object whose name has been checked, or is hidden."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object whose name has been checked, or is hidden."""


class Download:
    """An object that is downloaded as it is read; if the connection breaks, the download resumes where it was."""

    def __init__(
        self, connect: Callable[[int], Any], repeat: Callable[[Callable[[], bytes]], bytes], start: int
    ) -> None:
        """Connect when it is first read.

        Args:
            connect: Returns the object's content from a byte on, with the methods `read` and `close`.
            repeat: Returns what a function returns, repeating it on temporary errors.
            start: The first byte.
        """
        self._connect, self._repeat, self._position = connect, repeat, start
        self._body: Any = None

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`, and none at the end; raises `StorageError`."""
        content = self._repeat(lambda: self._read(size))
        self._position += len(content)
        return content

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._body is not None:
            self._body.close()
            self._body = None

    def _read(self, size: int) -> bytes:
        if self._body is None:
            self._body = self._connect(self._position)
        try:
            content: bytes = self._body.read(size)
        except Exception:
            self.close()
            raise
        return content


def outage_s() -> float:
    """Return for how many seconds calls of this process to a bucket that doesn't answer are repeated."""
    text = os.environ.get(OUTAGE_VARIABLE)
    if text is None:
        return OUTAGE_S
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{OUTAGE_VARIABLE} is {text!r}; give seconds, such as {OUTAGE_S:g}") from None


def content_type(name: str) -> str:
    """Return the media type that an object is served with, by its name's suffix."""
    return CONTENT_TYPES.get("." + name.rpartition(".")[2], "application/octet-stream")


def first_line(error: Exception) -> str:
    """Return the message of a client's exception, short enough for one of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def check_name(name: str, *, hidden: bool = False) -> str:
    """Return a name that can be used, or raise `Refused`. `hidden` allows parts that begin with a dot."""
    problem = name_problem(name, hidden=hidden)
    if problem is not None:
        raise Refused(f"the name {name!r} {problem}; give one such as 'clips/cat.mp4'")
    return name


def name_problem(name: str, *, hidden: bool = False) -> str | None:
    """Return why a name can't be used under a folder, or None if it can. `hidden` allows parts beginning with a dot."""
    if not name:
        return "is empty"
    if name.startswith("/") or "\\" in name:
        return "is not a relative path with forward slashes"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}, which would lead out of its folder, or to another name"
        if part.startswith(".") and not hidden:
            return f"has the part {part!r}, which would be hidden: parts may not begin with a dot"
        if len(part.encode(errors="replace")) > MAX_PART_BYTES:
            return f"has a part of more than {MAX_PART_BYTES} bytes"
    if any(not character.isprintable() for character in name):
        return "has a control character, or isn't valid Unicode"
    return None
