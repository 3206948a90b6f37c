"""Where inputs, results and snapshots live: a folder or gs://bucket/prefix, behind one small interface.

A *name* is a relative path with forward slashes, such as "clips/cat.mp4". What is written appears whole or not at all.
"""

import errno
import fcntl
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from actors.names import name_problem
from wan_tpu.errors import InvalidInput

GCS_SCHEME = "gs://"
_LOCK = ".wan-tpu.lock"
_PARTIAL = ".partial"


class StorageError(InvalidInput):
    """Something can't be read or written where it was asked for."""


class Missing(StorageError):
    """There is nothing under that name."""


class AlreadyThere(StorageError):
    """Something else is there that was not to be written over."""


class Storage(Protocol):
    """A folder of names; every method raises `StorageError` saying which path, why, and what to do."""

    def location(self, name: str = "") -> str:
        """Return the path or gs:// address of a name (of the folder itself when left out), for people and links."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content, or its bytes from `start` to before `stop`; raises `Missing`."""

    def size(self, name: str) -> int:
        """Return how many bytes it has; raises `Missing`."""

    def write(self, name: str, content: bytes, *, only_if_absent: bool = False) -> None:
        """Write the whole content or nothing, over what is there.

        only_if_absent  raise `AlreadyThere` instead of writing over other content; the same bytes are fine
        """

    def exists(self, name: str) -> bool:
        """Whether something is there."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return names that start with `prefix`, and their sizes in bytes, sorted; hidden ones are left out."""

    def delete(self, name: str) -> None:
        """Remove a name; it is fine when nothing is there."""

    def append(self, name: str, line: bytes) -> bool:
        """Add a line at the end, whole or not at all; false where nothing can be added to (gs://)."""

    def probe(self) -> None:
        """Write and remove a small file, so that a place that can't be written to is known before any work."""

    def claim(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Hold the place for one writer of `names`, and remove what a killed one left half written.

        Only a folder can be held (the lock ends with its process, however that ends); in gs:// nothing is ever half
        written, and two writers do double work but no harm.
        """


def open_storage(location: str | Path) -> Storage:
    """Return the storage at a folder (made when first written to) or gs://bucket/prefix.

    Raises `StorageError` for any other scheme, and where Google credentials are missing.
    """
    text = str(location)
    if text.startswith(GCS_SCHEME):
        from actors.gcs import GcsStorage  # here, so that a folder needs no cloud client (0.5 s)

        bucket, _, prefix = text.removeprefix(GCS_SCHEME).partition("/")
        return GcsStorage(bucket, prefix)
    if "://" in text or text.startswith("gs:"):  # a gs:// address that went through Path has one slash left
        raise StorageError(f"{text} is neither a folder nor gs://bucket/prefix; give one of these")
    if not text:
        raise StorageError("the folder's path is empty; give a folder ('.' for this one) or gs://bucket/prefix")
    return LocalStorage(text)


def split_location(location: str) -> tuple[str, str]:
    """Return (folder or gs:// prefix, name) of one file: what `open_storage(folder)` then reads."""
    if location.startswith(GCS_SCHEME):
        bucket, _, path = location.removeprefix(GCS_SCHEME).partition("/")
        folder, _, name = path.rpartition("/")
        return GCS_SCHEME + "/".join(part for part in (bucket, folder) if part), name
    path_ = Path(location)
    return str(path_.parent), path_.name


def check_name(name: str, *, hidden: bool = False) -> str:
    """Return a name that can be used; raises `StorageError` otherwise. hidden: as in `name_problem`."""
    problem = name_problem(name, hidden=hidden)
    if problem is not None:
        raise StorageError(f"the name {name!r} {problem}; give one such as 'clips/cat.mp4'")
    return name


class LocalStorage:
    """A folder of this machine, or of a file system that it has mounted."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).expanduser().absolute()
        self._writing = threading.Lock()  # one that doesn't fit takes all the room until it has failed

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return LocalStorage, (str(self._folder),)

    def location(self, name: str = "") -> str:
        """Return the absolute path."""
        return str(self._path(name) if name else self._folder)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content of the file, or a part of it."""
        with _reading(self._path(name)) as path, path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else max(0, stop - start))

    def size(self, name: str) -> int:
        """Return the size of the file."""
        with _reading(self._path(name)) as path:
            return path.stat().st_size

    def write(self, name: str, content: bytes, *, only_if_absent: bool = False) -> None:
        """Write beside it, flush to the disk, rename: a reader sees the old file or the new one."""
        path = self._path(name)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_PARTIAL}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._writing:
                try:
                    _write_through(partial, content)
                    if only_if_absent:
                        os.link(partial, path)  # unlike a rename, it fails when something is there
                    else:
                        os.replace(partial, path)
                    _sync_folder(path.parent)
                finally:
                    partial.unlink(missing_ok=True)
        except FileExistsError as error:
            if not path.is_file():
                raise _write_error(path, error) from None
            if self.read(name) != content:
                raise AlreadyThere(f"{path} exists already; choose another name, or delete it") from None
        except OSError as error:
            raise _write_error(path, error) from None

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return self._path(name).is_file()

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return files below the folder."""
        found: dict[str, int] = {}
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self._folder).as_posix()
                if name.startswith(prefix) and not file.startswith("."):
                    try:
                        found[name] = path.stat().st_size
                    except FileNotFoundError:  # deleted meanwhile
                        continue
        return dict(sorted(found.items()))

    def delete(self, name: str) -> None:
        """Remove the file."""
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"can't delete {path} ({_reason(error)}); check its permissions") from None

    def append(self, name: str, line: bytes) -> bool:
        """Add a line at the end of a file, in one write."""
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if file.write(line) != len(line):
                    file.truncate(size)  # half a line is worse than none
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _write_error(path, error) from None
        return True

    def probe(self) -> None:
        """Write and remove a hidden file of one block."""
        probe = self._folder / f".probe.{uuid.uuid4().hex[:12]}{_PARTIAL}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._writing:
                try:
                    _write_through(probe, bytes(4096))
                finally:
                    probe.unlink(missing_ok=True)
        except OSError as error:
            raise _write_error(self._folder, error) from None

    @contextmanager
    def claim(self, names: Iterable[str]) -> Iterator[None]:
        """Hold a lock file; raises `StorageError` naming the process that has it."""
        lock = self._folder / _LOCK
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = open(lock, "a+")  # noqa: SIM115 (closed below; closing it is what ends the lock)
        except OSError as error:
            raise _write_error(self._folder, error) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise StorageError(
                    f"{self._folder} is being written to by {holder}; wait for it, or choose another folder"
                ) from None
            except OSError:
                pass  # a mounted file system without locks: as in gs://, two writers do double work but no harm
            self._note_holder(file)
            self._remove_partials(names)
            yield

    @staticmethod
    def _note_holder(file: Any) -> None:
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError:
            pass  # a full disk is said by the probe; the lock holds without its note

    def _remove_partials(self, names: Iterable[str]) -> None:
        ours = {self._path(name) for name in names}
        for folder in {path.parent for path in ours}:
            for partial in folder.glob(f".*{_PARTIAL}"):
                written, _, _ = partial.name[1:].removesuffix(_PARTIAL).rpartition(".")
                if written == "probe" or folder / written in ours:
                    partial.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / check_name(name)


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    except FileNotFoundError:
        raise Missing(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise StorageError(f"can't read {path} ({_reason(error)}); check the path and its permissions") from None


def _write_through(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # not every file system can; the file itself is on the disk
    finally:
        os.close(handle)


def _write_error(path: Path, error: OSError) -> StorageError:
    remedy = "choose a folder that can be written to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "make room, or choose a folder on another disk"
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit on file sizes (ulimit -f), or choose another disk"
    return StorageError(f"can't write {path} ({_reason(error)}); {remedy}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
