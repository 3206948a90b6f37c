"""Identify the content of a video or an adapter, which may change under the same path or address, and of a request.

This module imports neither JAX nor torch, because it is used by drivers, which compute nothing.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from wan_tpu.errors import CheckpointError, InvalidInput, Unavailable
from wan_tpu.fields import list_values
from wan_tpu.request import DIFFUSERS, IMAGES, ResolvedRequest
from wan_tpu.sources.disk import explain_disk_error, is_permanent
from wan_tpu.storage.addresses import is_bucket
from wan_tpu.storage.folder import BucketFolder

# The files of an adapter: its weights, and the configuration that peft writes beside them.
_ADAPTER_ENDING, _ADAPTER_CONFIG = ".safetensors", "adapter_config.json"
_REMEMBERED = 1024  # Checksums that a process keeps. Requests usually share their adapters.
_UNSETTLED_NS = 2 * 10**9  # A file that changed so recently may change again within the resolution of its time stamp.

log = logging.getLogger(__name__)

T = TypeVar("T")
Stamps = tuple[tuple[str, int, int, int], ...]  # For each file: path, inode, bytes, nanoseconds of the last change.


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A video or an adapter as it was when `identify` looked at it."""

    location: str  # Absolute path, address in a bucket, or hub id.
    version: str  # Changes whenever the content does: a checksum, the versions of objects in a bucket, or a hub commit.
    # Stamps of its files on this machine. As long as they are unchanged, the content isn't read again.
    stamps: Stamps = ()

    def check(self) -> None:
        """Check that the content is unchanged; sources that aren't on this machine aren't checked.

        Raises:
            InvalidInput: It has changed.
            Unavailable: The disk fails.
        """
        if not self.stamps or _look(self.location) == self.stamps:
            return
        now = identify(self.location)
        if now is None or now.version != self.version:
            raise InvalidInput(f"{self.location} has changed since this run looked at it; start the run again")


def identify(location: str) -> Source | None:
    """Identify the content of a video or an adapter.

    Returns:
        The source, or None if it can't be identified here: the file isn't on this machine, or the hub commit is
        unknown.

    Raises:
        Unavailable: The bucket doesn't answer now, or the disk fails.
    """
    if is_bucket(location):
        versions = _object_versions(location)
        # Recorded batches compare this text, so it keeps Google's word for the versions of objects in any bucket.
        return Source(location, f"generation {' '.join(versions)}") if versions else None
    if stamps := _look(location):
        checksum = _ask(lambda: _checksum(stamps), location)
        return None if checksum is None else Source(location, f"sha256 {checksum}", stamps)
    commit = _hub_commit(location)
    return None if commit is None else Source(location, f"commit {commit}")


def digest_states(request: ResolvedRequest, model: str) -> str:
    """Return a digest, in hex, of everything that determines the states of a request.

    This reads the files of the request's video and adapters, or asks their bucket.

    Args:
        request: The request, which determines the states together with the model.
        model: Everything about the model that determines the states, such as checkpoint and dtype.
    """
    fields = list_values(request)
    references = request.references or ()
    images = [fields.pop(name) for name in IMAGES]
    images += [reference.source for reference in references if reference.kind == "image"]
    for name in ("hidden_frames", "blended_frames", "keeps_tail", "origin"):  # They change the mp4, not the states.
        fields.pop(name, None)
    digest = hashlib.sha256(json.dumps([model, fields], sort_keys=True, default=str).encode())
    if request.preset == DIFFUSERS:
        digest.update(b"2")  # Its steps and guidance were others once, so states from then aren't gone on from.
    for image in images:
        if image is not None:
            digest.update(f"{image.mode} {image.size}".encode() + image.tobytes())
    files = request.video, *(reference.source for reference in references)
    paths = [adapter.path for adapter in request.loras] + [file for file in files if isinstance(file, str)]
    if versions := {path: version for path in paths if (version := _read_version(path)) is not None}:
        digest.update(json.dumps(versions, sort_keys=True).encode())
    return digest.hexdigest()


def _read_version(path: str) -> str | None:
    """Return the version of a video's or an adapter's content; None if this process can't determine it.

    A source that doesn't answer doesn't fail the request, because the hosts may be able to reach it, and report it if
    they can't. The digest then contains only the path. A later run that does know the version starts from the
    beginning. That repeats steps, but never mixes the states of different contents.
    """
    try:
        source = identify(path)
    except Unavailable as error:
        log.warning("the names of snapshots don't include the version of %s, which can't be read: %s", path, error)
        return None
    return None if source is None else source.version


def _ask(read: Callable[[], T], location: str) -> T | None:
    """Return what `read` returns; None where the file is missing, or this process may not read it.

    Raises:
        Unavailable: The disk fails. Treating that as "not here" would let changed content pass as unchanged.
    """
    try:
        return read()
    except ValueError:  # No file can have such a name.
        return None
    except OSError as error:
        if is_permanent(error):
            return None
        raise explain_disk_error(error, location) from None


def _look(location: str) -> Stamps:
    """Return the stamps of the files of a video or an adapter on this machine; empty if it isn't here."""
    return _ask(lambda: _stamps(_files(Path(location))), location) or ()


def _files(path: Path) -> list[Path]:
    """Return a video's or an adapter's files, without `Path.is_dir` and `Path.glob`, which may hide disk failures."""
    if stat.S_ISDIR(path.stat().st_mode):
        names = sorted(os.listdir(path))
        weights = [path / name for name in names if name.endswith(_ADAPTER_ENDING)]
        return weights + [path / _ADAPTER_CONFIG] * (_ADAPTER_CONFIG in names)
    if not stat.S_ISREG(path.stat().st_mode):
        return []
    has_config = path.suffix == _ADAPTER_ENDING and _ADAPTER_CONFIG in os.listdir(path.parent)
    return [path] + [path.parent / _ADAPTER_CONFIG] * has_config


def _stamps(files: Iterable[Path]) -> Stamps:
    stats = [(str(file), file.stat()) for file in files]
    return tuple((name, entry.st_ino, entry.st_size, entry.st_mtime_ns) for name, entry in stats)


def _checksum(stamps: Stamps) -> str:
    """Return the SHA-256 of a file, or of the names and checksums of several."""
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
    lines = [f"{file.name} {checksum}\n" for file, checksum in zip(files, checksums, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


_remembered_checksum = functools.lru_cache(_REMEMBERED)(_read_checksum)


def _object_versions(location: str) -> list[str]:
    """Return the versions of a source's objects in a bucket; empty if this machine has no access to them."""
    folder, _, name = location.rpartition("/")
    single = name.endswith(_ADAPTER_ENDING)
    try:
        objects = BucketFolder(folder if single else location).files()
    except CheckpointError:
        return []
    if single:
        names = [other for other in (name, _ADAPTER_CONFIG) if other in objects]
    else:
        names = [other for other in sorted(objects) if other.endswith(_ADAPTER_ENDING)]
        names += [_ADAPTER_CONFIG] * (_ADAPTER_CONFIG in objects)
    return [objects[other].version for other in names]


def _hub_commit(location: str) -> str | None:
    """Return the commit of a hub's repository, OWNER/NAME[/FILE], in this machine's cache, if there is one."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    owner, _, rest = location.partition("/")
    name = rest.partition("/")[0]
    if not owner or not name or location.startswith((".", "/", "~")):
        return None
    folder = repo_folder_name(repo_id=f"{owner}/{name}", repo_type="model")
    commit = _ask(Path(constants.HF_HUB_CACHE, folder, "refs", "main").read_text, location)
    return None if commit is None else commit.strip() or None
