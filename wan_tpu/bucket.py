"""A folder of Google Cloud Storage: weights are read from it in ranges, other files are fetched when they are needed.

What was fetched is kept, and fetched again only when the object has changed: WAN_TPU_CACHE says where, ~/.cache/wan-tpu
else. STORAGE_EMULATOR_HOST sends everything to an emulator, as Google's client does it.
"""

import contextlib
import fnmatch
import functools
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock

from wan_tpu.errors import CheckpointError

SCHEME = "gs://"


def cache_folder() -> Path:
    """Return where files of buckets are kept."""
    return Path(os.environ.get("WAN_TPU_CACHE") or Path.home() / ".cache" / "wan-tpu")


class WeightFile(NamedTuple):
    """A file of weights, on disk or in a bucket. read(start, stop) returns bytes of it; raises `CheckpointError`.

    version  another one when the file has changed
    """

    address: str
    size: int
    read: Callable[[int, int], bytes]
    version: str = ""


class DiskFolder:
    """A folder of this machine, written to as one of a bucket is."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).resolve()
        self.address = str(self._folder)

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        return (self._folder / name).is_file()

    def read(self, name: str) -> bytes:
        """Return a file; raises `FileNotFoundError`."""
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self.open(name) as file:
            file.write(content)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Give a file that is there under its name once it is whole."""
        path = self._folder / name
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                yield file
            part.rename(path)
        except OSError as error:
            raise CheckpointError(f"can't write {path} ({error})") from error
        finally:
            part.unlink(missing_ok=True)


class BucketFolder:
    """The objects below gs://bucket/prefix, as a folder of this machine."""

    def __init__(self, address: str) -> None:
        """Raise `CheckpointError` for what is no address."""
        self.address = address.rstrip("/")
        self._bucket, _, prefix = self.address.removeprefix(SCHEME).partition("/")
        if not self._bucket or not prefix:
            raise CheckpointError(f"{address} names no folder of a bucket; give {SCHEME}bucket/folder")
        self._prefix = f"{prefix}/"
        self.folder = cache_folder() / "buckets" / self._bucket / prefix

    def files(self, pattern: str) -> dict[str, "WeightFile"]:
        """Return the objects whose names match a pattern, to read ranges of them where they are."""
        with self._explained():
            found = {name: blob for name, blob in self._blobs.items() if fnmatch.fnmatch(name, pattern)}
        return {
            name: WeightFile(f"{self.address}/{name}", blob.size or 0, functools.partial(self._read, blob), generation)
            for name, (blob, generation) in found.items()
        }

    def _read(self, blob: Any, start: int, stop: int) -> bytes:
        with self._explained():
            return blob.download_as_bytes(start=start, end=stop - 1, raw_download=True)

    def fetch(self, patterns: Sequence[str]) -> Path:
        """Have all files whose names match one of the patterns ("*.json", "vae/*") here; return the folder.

        Raises `CheckpointError` when the bucket doesn't give them.
        """
        with self._explained():
            for name, (blob, generation) in self._blobs.items():
                if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                    self._fetch(name, blob, generation)
            for file in self.folder.rglob("*"):
                name = file.relative_to(self.folder).as_posix()
                wanted = any(fnmatch.fnmatch(name, pattern) for pattern in patterns) and not file.name.startswith(".")
                if wanted and name not in self._blobs and file.is_file():
                    file.unlink(missing_ok=True)  # it was deleted there
        return self.folder

    def has(self, name: str) -> bool:
        """Whether an object is there."""
        with self._explained():
            return name in self._blobs

    def read(self, name: str) -> bytes:
        """Return an object; raises `FileNotFoundError`."""
        from google.api_core.exceptions import NotFound

        with self._explained():
            try:
                return self._blob(name).download_as_bytes()
            except NotFound:
                pass
        raise FileNotFoundError(f"{self.address}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        with self._explained():
            self._blob(name).upload_from_string(content)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Give a file that becomes an object as it is written, without a copy here."""
        with self._explained(), self._blob(name).open("wb") as file:
            yield file

    def _blob(self, name: str) -> Any:
        from google.cloud import storage

        return storage.Client().bucket(self._bucket).blob(f"{self._prefix}{name}")

    @functools.cached_property
    def _blobs(self) -> dict[str, tuple[Any, str]]:
        """All objects and their generations, which a download may forget, by their names below the prefix."""
        from google.cloud import storage  # a second, and only for who has a bucket

        found = storage.Client().list_blobs(self._bucket, prefix=self._prefix)
        return {
            blob.name.removeprefix(self._prefix): (blob, str(blob.generation))
            for blob in found
            if not blob.name.endswith("/")
        }

    def _fetch(self, name: str, blob: Any, generation: str) -> None:
        file = self.folder / name
        if not file.resolve().is_relative_to(self.folder.resolve()):
            raise CheckpointError(f"{self.address} has an object {name!r}, which would lie elsewhere")
        file.parent.mkdir(parents=True, exist_ok=True)
        mark = file.with_name(f".{file.name}.generation")
        with FileLock(file.with_name(f".{file.name}.lock")):  # others of this machine want the same
            with contextlib.suppress(OSError):
                if file.exists() and mark.read_text() == generation:
                    return
            part = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
            try:
                blob.download_to_filename(str(part))  # its checksum compared
                part.rename(file)
                mark.write_text(generation)
            finally:
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        import requests
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except (GoogleAPIError, GoogleAuthError, requests.RequestException, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"can't reach {self.address} ({reason}); check the address, and what this machine may do there"
            ) from None


def writable(address: str) -> DiskFolder | BucketFolder:
    """Return a folder to write a checkpoint to; raises `CheckpointError` for what is no address."""
    return BucketFolder(address) if address.startswith(SCHEME) else DiskFolder(address)
