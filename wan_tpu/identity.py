"""What tells the content of a video or an adapter from other content at the same path or address.

No JAX, no torch: drivers ask for it, who compute nothing.
"""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

from wan_tpu.errors import CheckpointError, InvalidInput
from wan_tpu.storage.addresses import is_bucket
from wan_tpu.storage.folder import BucketFolder

# What an adapter is read from: its weights, and the configuration that peft writes beside them.
_ADAPTER_ENDING, _ADAPTER_CONFIG = ".safetensors", "adapter_config.json"
_REMEMBERED = 1024  # Checksums that a process keeps: requests usually share their adapters.
_UNSETTLED_NS = 2 * 10**9  # A file changed so lately may change again without another time of its last change.

Stamps = tuple[tuple[str, int, int, int], ...]  # Of files: path, inode, bytes, nanoseconds of the last change.


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A video or an adapter as it was when `identify` looked at it.

    location  absolute path, gs:// or hub id
    version   another one when its content is another: a checksum, generations in a bucket, a commit of the hub
    stamps    of its files here: while they are the same, the content isn't read again
    """

    location: str
    version: str
    stamps: Stamps = ()

    def check(self) -> None:
        """Raise `InvalidInput` when its content is another by now; what isn't on this machine is not looked at."""
        if not self.stamps or _stamps(_files(self.location)) == self.stamps:
            return
        now = identify(self.location)
        if now is None or now.version != self.version:
            raise InvalidInput(f"{self.location} has changed since this run looked at it; start the run again")


def identify(location: str) -> Source | None:
    """Return what tells the content of a video or an adapter from other content at the same place.

    Returns:
        None where this machine can't tell: it isn't here, or the hub's commit isn't known.

    Raises:
        Unavailable: The bucket doesn't answer now.
    """
    if is_bucket(location):
        generations = _generations(location)
        return Source(location, f"generation {' '.join(generations)}") if generations else None
    try:
        if files := _files(location):
            stamps = _stamps(files)
            return Source(location, f"sha256 {_checksum(stamps)}", stamps)
    except OSError:
        return None
    commit = _hub_commit(location)
    return None if commit is None else Source(location, f"commit {commit}")


def _files(location: str) -> list[Path]:
    """Return the files here that a video or an adapter is read from; none where it isn't here."""
    path = Path(location)
    if path.is_dir():
        return [*sorted(path.glob(f"*{_ADAPTER_ENDING}")), *path.glob(_ADAPTER_CONFIG)]
    if not path.is_file():
        return []
    return [path, *(path.parent.glob(_ADAPTER_CONFIG) if path.suffix == _ADAPTER_ENDING else ())]


def _stamps(files: Iterable[Path]) -> Stamps:
    found = [(str(file), file.stat()) for file in files]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _checksum(stamps: Stamps) -> str:
    """Return the SHA-256 of a file; of several, that of their names and checksums."""
    changed_ns = max(mtime_ns for *_, mtime_ns in stamps)
    if time.time_ns() - changed_ns < _UNSETTLED_NS:
        return _read_checksum(stamps)
    return _remembered_checksum(stamps)


def _read_checksum(stamps: Stamps) -> str:
    files = [Path(name) for name, *_ in stamps]
    checksums = []
    for path in files:
        with path.open("rb") as file:
            checksums.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(files) == 1:
        return checksums[0]
    named = [f"{file.name} {checksum}\n" for file, checksum in zip(files, checksums, strict=True)]
    return hashlib.sha256("".join(named).encode()).hexdigest()


_remembered_checksum = functools.lru_cache(_REMEMBERED)(_read_checksum)


def _generations(location: str) -> list[str]:
    """Return the generations of the objects that an adapter is read from; none where this machine may not look."""
    folder, _, name = location.rpartition("/")
    single = name.endswith(_ADAPTER_ENDING)
    try:
        objects = BucketFolder(folder if single else location).files()
    except CheckpointError:
        return []
    if single:
        wanted = [other for other in (name, _ADAPTER_CONFIG) if other in objects]
    else:
        wanted = [other for other in sorted(objects) if other.endswith(_ADAPTER_ENDING)]
        wanted += [_ADAPTER_CONFIG] * (_ADAPTER_CONFIG in objects)
    return [objects[other].version for other in wanted]


def _hub_commit(location: str) -> str | None:
    """Return the commit of a hub's repository, OWNER/NAME[/FILE], that the cache of this machine holds, if any."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    owner, _, rest = location.partition("/")
    name = rest.partition("/")[0]
    if not owner or not name or location.startswith((".", "/", "~")):
        return None
    folder = repo_folder_name(repo_id=f"{owner}/{name}", repo_type="model")
    try:
        return Path(constants.HF_HUB_CACHE, folder, "refs", "main").read_text().strip() or None
    except (OSError, ValueError):
        return None
