"""A bucket as a local folder: weights are read from it in ranges, other files are fetched when needed.

Fetched files are kept in the user's cache folder, and fetched again only when the object has changed.
"""

import contextlib
import fnmatch
import functools
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from wan_tpu.errors import CheckpointError, Unavailable
from wan_tpu.storage.addresses import split_bucket
from wan_tpu.storage.base import BucketStorage, Missing, Refused, StorageError, StoredObject
from wan_tpu.storage.opening import open_bucket


def cache_folder() -> Path:
    """Return where this user's cache is: compiled programs, files of buckets, what unfinished commands have made."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("WAN_TPU_CACHE") or Path(home) / "wan-tpu")


def state_folder() -> Path:
    """Return where this user's state is kept: clusters, jobs, keys and the history of prompts."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "wan-tpu"


class WeightFile(NamedTuple):
    """A file of weights, on disk or in a bucket.

    Attributes:
        address: The path or address, for messages.
        size: The size in bytes.
        read: Returns the bytes from `start` to before `stop`; raises `CheckpointError` or `Unavailable`.
        version: A string that changes with the file.
    """

    address: str
    size: int
    read: Callable[[int, int], bytes]
    version: str = ""


class BucketFolder:
    """The objects below an address such as gs://bucket/prefix, as a local folder.

    Every method raises `CheckpointError` if the bucket refuses, and `Unavailable` if it doesn't answer, or if the local
    disk can't hold what was fetched.
    """

    def __init__(self, address: str) -> None:
        """Raise `CheckpointError` if the address names no folder of a bucket."""
        self.address = address.rstrip("/")
        scheme, bucket, prefix = split_bucket(self.address)
        if not bucket or not prefix:
            raise CheckpointError(f"{address} names no folder of a bucket; give {scheme}bucket/folder")
        # Buckets of two services may have the same name, so each service has its own folder.
        service = "buckets" if scheme == "gs://" else f"{scheme.removesuffix('://')}-buckets"
        self.folder = cache_folder() / service / bucket / prefix

    def files(self, folder: str = "") -> dict[str, WeightFile]:
        """Return the objects in this folder, or in a subfolder, by their names there, to read ranges of them."""
        prefix = f"{folder}/" if folder else ""
        with self._explain_errors():
            objects = {name: stored for name, stored in self._objects.items() if name.startswith(prefix)}
        return {
            name.removeprefix(prefix): self._make_file(name, stored)
            for name, stored in objects.items()
            if "/" not in name.removeprefix(prefix)
        }

    def find(self, name: str) -> WeightFile | None:
        """Return one object, to read ranges of it, or None if it doesn't exist. The folder isn't listed."""
        with self._explain_errors():
            try:
                return self._make_file(name, self._storage.stat(name))
            except Missing:
                return None

    def _make_file(self, name: str, stored: StoredObject) -> WeightFile:
        read = functools.partial(self._read, name, stored.version)
        return WeightFile(f"{self.address}/{name}", stored.size, read, stored.version)

    def _read(self, name: str, version: str, start: int, stop: int) -> bytes:
        with self._explain_errors():
            return self._storage.read_version(name, version, start, stop)

    def fetch(self, patterns: Sequence[str], ignored: str | None = None) -> Path:
        """Fetch all files whose names match one of the patterns ("*.json", "vae/*"); return the folder.

        Args:
            patterns: The patterns, in which * also matches slashes.
            ignored: The pattern of files that aren't fetched even if they match.
        """

        def is_wanted(name: str) -> bool:
            if ignored is not None and fnmatch.fnmatch(name, ignored):
                return False
            return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

        with self._explain_errors():
            for name, stored in self._objects.items():
                if is_wanted(name):
                    self._fetch(name, stored.version)
            for file in self.folder.rglob("*"):
                name = file.relative_to(self.folder).as_posix()
                is_own = name in self._objects or file.name.startswith(".")
                if is_wanted(name) and not is_own and file.is_file():
                    file.unlink(missing_ok=True)  # The object was deleted from the bucket.
        return self.folder

    @functools.cached_property
    def _storage(self) -> BucketStorage:
        return open_bucket(self.address)

    @functools.cached_property
    def _objects(self) -> dict[str, StoredObject]:
        return self._storage.objects()

    def _fetch(self, name: str, version: str) -> None:
        file = self.folder / name
        if not file.resolve().is_relative_to(self.folder.resolve()):
            raise CheckpointError(
                f"{self.address} has an object {name!r}, whose name leads out of the folder; rename or delete it"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        mark = file.with_name(f".{file.name}.generation")
        with FileLock(file.with_name(f".{file.name}.lock")):  # Other processes of this machine may fetch the same file.
            with contextlib.suppress(OSError):
                if file.exists() and mark.read_text() == version:
                    return
            part = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
            try:
                self._storage.download(name, version, part)
                part.rename(file)
                mark.write_text(version)
            finally:
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn errors of storage and of the local disk into those of checkpoints, by whose fault they are."""
        try:
            yield
        except Refused as error:
            raise CheckpointError(str(error)) from None
        except StorageError as error:
            raise Unavailable(str(error)) from None
        except OSError as error:
            raise Unavailable(
                f"{self.address} can't be cached on this machine ({error.strerror or error}); check the disk of "
                f"{self.folder}, or "
                "set WAN_TPU_CACHE to a folder on another one"
            ) from None
