"""A folder of this machine, or of a file system that it has mounted."""

import contextlib
import errno
import fcntl
import functools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from wan_tpu.storage.base import Missing, NoSpace, OpenFile, Storage, StorageError, check_name

_LOCK = ".wan-tpu.lock"
_PARTIAL = ".partial"


class LocalStorage(Storage):
    """A folder of this machine, or of a file system that it has mounted."""

    def __init__(self, folder: str | Path, *, private: bool = True) -> None:
        """Use a folder. With `private`, only its user can read its files, whatever the umask and the folder allow."""
        self._folder = Path(folder).expanduser().absolute()
        self._private = private
        self._one_at_a_time = threading.Lock()  # A write that doesn't fit uses up all the space until it fails.

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial(LocalStorage, private=self._private), (str(self._folder),)

    def location(self, name: str = "") -> str:
        """Return the absolute path."""
        return str(self._path(name) if name else self._folder)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content of the file, or a part of it."""
        with _reading(self._path(name)) as path, path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else max(0, stop - start))

    def open(self, name: str, start: int = 0) -> OpenFile:
        """Open the file."""
        return _OpenLocalFile(self._path(name), start)

    def size(self, name: str) -> int:
        """Return the size of the file."""
        with _reading(self._path(name)) as path:
            return path.stat().st_size

    def write(self, name: str, content: bytes) -> None:
        """Write a temporary file, flush it to disk and rename it: a reader sees the old file or the new one."""
        with self._one_at_a_time, self.writing(name) as file:
            file.write(content)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file beside it, which is flushed to disk and renamed at the end."""
        path = self._path(name)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._partial(path) as (partial, file):
                yield file
                _flush(file)
                partial.replace(path)
                _sync_folder(path.parent)

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return files below the folder."""
        sizes: dict[str, int] = {}
        with _reading(self._folder):
            for folder, folders, files in os.walk(self._folder, onerror=_unless_missing):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for file in files:
                    path = Path(folder, file)
                    name = path.relative_to(self._folder).as_posix()
                    if name.startswith(prefix) and not file.startswith("."):
                        with contextlib.suppress(FileNotFoundError):  # It was deleted meanwhile.
                            sizes[name] = path.stat().st_size
        return dict(sorted(sizes.items()))

    def delete(self, name: str) -> None:
        """Remove the file."""
        path = self._path(name)
        with _writing(path, "delete"):
            path.unlink(missing_ok=True)

    def clean(self, older_s: float) -> None:
        """Remove hidden partial files that haven't been written to for that long."""
        for folder, _, files in os.walk(self._folder):
            for path in (Path(folder, name) for name in files if name.startswith(".") and name.endswith(_PARTIAL)):
                with _writing(path, "delete"), contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > older_s:
                        path.unlink()

    def probe(self) -> None:
        """Write and remove a hidden file of one block."""
        with _writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._one_at_a_time, self._partial(self._folder / "probe") as (_, file):
                file.write(bytes(4096))
                _flush(file)

    def free(self) -> int | None:
        """Return the bytes that this user may still write to the file system."""
        with _writing(self._folder):
            disk = os.statvfs(next(path for path in (self._folder, *self._folder.parents) if path.exists()))
        return disk.f_bavail * disk.f_frsize

    @contextlib.contextmanager
    def claim(self, names: Iterable[str]) -> Iterator[None]:
        """Hold a lock file; raises `StorageError` naming the process that has it."""
        with _writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            file = open(self._folder / _LOCK, "a+", opener=_for_its_user_only)  # noqa: SIM115 (closed below; closing it is what ends the lock)
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
            with contextlib.suppress(OSError):  # The probe reports a full disk; the lock holds without its note.
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
            self._remove_partials(names)
            yield

    def _remove_partials(self, names: Iterable[str]) -> None:
        ours = {os.path.join(self._folder, check_name(name)) for name in names}  # strings: there may be a million
        for folder in {os.path.dirname(path) for path in ours}:
            for partial in Path(folder).glob(f".*{_PARTIAL}"):
                original, _, _ = partial.name[1:].removesuffix(_PARTIAL).rpartition(".")
                if original == "probe" or os.path.join(folder, original) in ours:
                    partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _partial(self, path: Path) -> Iterator[tuple[Path, BinaryIO]]:
        """Provide a hidden file beside `path`, with its path, to write to; it no longer exists afterwards."""
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{_PARTIAL}")
        try:
            with open(partial, "wb", opener=_for_its_user_only if self._private else None) as file:
                yield partial, file
        finally:
            partial.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / check_name(name)


def _for_its_user_only(path: str, flags: int) -> int:
    """Open a file that no other user can read, whatever the process's umask and the folder allow.

    Files contain prompts, pictures and latents, and not every process that writes snapshots belongs to the service.
    """
    return os.open(path, flags, 0o600)


class _OpenLocalFile:
    """A file that outlives its name."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        with _reading(path):
            self._file = path.open("rb", buffering=0)
            self._file.seek(start)

    def read(self, size: int) -> bytes:
        with _reading(self._path):
            return self._file.read(size)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    except FileNotFoundError:
        raise Missing(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise StorageError(f"can't read {path} ({_reason(error)}); check the path and its permissions") from None


def _unless_missing(error: OSError) -> None:
    """Raise an error of listing, unless the folder doesn't exist: a folder that can't be listed isn't empty."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _flush(file: BinaryIO) -> None:
    """Flush what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # not every file system can; the file itself is on the disk
        os.fsync(handle)
    os.close(handle)


@contextlib.contextmanager
def _writing(path: Path, action: str = "write") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind, remedy = StorageError, "choose a folder that can be written to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind, remedy = NoSpace, "free some space, or choose a folder on another disk"
        elif error.errno == errno.EFBIG:
            remedy = "raise the limit on file sizes (ulimit -f), or choose another disk"
        raise kind(f"can't {action} {path} ({_reason(error)}); {remedy}") from None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
