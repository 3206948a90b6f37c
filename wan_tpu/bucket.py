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
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock

from wan_tpu.errors import CheckpointError, OutputError, Unavailable
from wan_tpu.sources.statuses import is_refusal

SCHEME = "gs://"
OUTAGE_S = 120.0  # A bucket that hasn't answered for so long is given up; Google's client repeats each call until then.


def cache_folder() -> Path:
    """Return where files of buckets are kept."""
    return Path(os.environ.get("WAN_TPU_CACHE") or Path.home() / ".cache" / "wan-tpu")


class WeightFile(NamedTuple):
    """A file of weights, on disk or in a bucket.

    read(start, stop) returns bytes of it; raises `CheckpointError` or `Unavailable`.

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
        """Give a file that is there under its name once it is whole; raises `OutputError`."""
        path = self._folder / name
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                yield file
            part.rename(path)
        except OSError as error:
            raise OutputError(f"can't write {path} ({error.strerror or error})") from error
        finally:
            part.unlink(missing_ok=True)


class BucketFolder:
    """The objects below gs://bucket/prefix, as a folder of this machine.

    Every method raises `CheckpointError` when the bucket refuses, and `Unavailable` when it doesn't answer, or when the
    disk here can't keep what it gave.
    """

    def __init__(self, address: str) -> None:
        """Raise `CheckpointError` for what is no address."""
        self.address = address.rstrip("/")
        self._bucket, _, prefix = self.address.removeprefix(SCHEME).partition("/")
        if not self._bucket or not prefix:
            raise CheckpointError(f"{address} names no folder of a bucket; give {SCHEME}bucket/folder")
        self._prefix = f"{prefix}/"
        self.folder = cache_folder() / "buckets" / self._bucket / prefix

    def files(self, folder: str = "") -> dict[str, "WeightFile"]:
        """Return the objects in this folder, or in one in it, by their names there, to read ranges of them."""
        prefix = f"{folder}/" if folder else ""
        with self._explained():
            objects = {name.removeprefix(prefix): blob for name, blob in self._blobs.items() if name.startswith(prefix)}
        return {
            name: WeightFile(
                f"{self.address}/{prefix}{name}", blob.size or 0, functools.partial(self._read, blob), generation
            )
            for name, (blob, generation) in objects.items()
            if "/" not in name
        }

    def _read(self, blob: Any, start: int, stop: int) -> bytes:
        with self._explained():
            return blob.download_as_bytes(start=start, end=stop - 1, raw_download=True, retry=_retry())

    def fetch(self, patterns: Sequence[str]) -> Path:
        """Have all files whose names match one of the patterns ("*.json", "vae/*") here; return the folder."""
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
                return self._blob(name).download_as_bytes(retry=_retry())
            except NotFound:
                pass
        raise FileNotFoundError(f"{self.address}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        with self._explained():
            self._blob(name).upload_from_string(content, retry=_retry())

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Give a file that becomes an object as it is written, without a copy here."""
        with self._explained(), self._blob(name).open("wb", retry=_retry()) as file:
            yield file

    def _blob(self, name: str) -> Any:
        from google.cloud import storage

        return storage.Client().bucket(self._bucket).blob(f"{self._prefix}{name}")

    @functools.cached_property
    def _blobs(self) -> dict[str, tuple[Any, str]]:
        """All objects and their generations, which a download may forget, by their names below the prefix."""
        from google.cloud import storage  # a second, and only for who has a bucket

        found = storage.Client().list_blobs(self._bucket, prefix=self._prefix, retry=_retry())
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
                blob.download_to_filename(str(part), retry=_retry())  # its checksum compared
                part.rename(file)
                mark.write_text(generation)
            finally:
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what Google's client raises into errors of this package, by whose fault it is."""
        import requests
        import urllib3
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

        client = (GoogleAPIError, GoogleAuthError, InvalidResponse, DataCorruption)
        transport = (requests.RequestException, urllib3.exceptions.HTTPError, HTTPException)
        try:
            yield
        except (*client, *transport, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if _is_refused(error):
                raise CheckpointError(
                    f"can't reach {self.address} ({reason}); check the address, and what this machine may do there"
                ) from None
            raise Unavailable(
                f"{self.address} doesn't answer now, or can't be kept here ({reason}); "
                "check the network, Google's credentials and the disk, and try again"
            ) from None


def _is_refused(error: Exception) -> bool:
    """Return whether a bucket, or the server that grants access to it, has answered no, and would answer so again."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
    from google.cloud.storage.exceptions import InvalidResponse

    if isinstance(error, GoogleAPICallError):
        return error.code is not None and is_refusal(int(error.code))
    if isinstance(error, InvalidResponse):
        return is_refusal(error.response.status_code)
    if isinstance(error, DefaultCredentialsError):
        # Its subclasses say what is wrong with credentials that were found. Without a key file, they come from the
        # machine's metadata server, whose silence, as when a pod has just started, can't be told from its absence.
        return type(error) is not DefaultCredentialsError or "GOOGLE_APPLICATION_CREDENTIALS" in os.environ
    if isinstance(error, RefreshError):
        return not error.retryable and not isinstance(error.__cause__, TransportError)
    return False


def _retry() -> Any:
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(OUTAGE_S)


def writable(address: str) -> DiskFolder | BucketFolder:
    """Return a folder to write a checkpoint to; raises `CheckpointError` for what is no address."""
    return BucketFolder(address) if address.startswith(SCHEME) else DiskFolder(address)
