"""The files that lines of a manifest name: where they are, what is in them, and whether that is still the same."""

import dataclasses
import hashlib
import io
import os
import posixpath
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from actors.storage.base import GCS_SCHEME, StorageError
from actors.storage.opening import open_storage, split_location
from wan_tpu.bucket import BucketFolder
from wan_tpu.errors import CheckpointError, InvalidInput, WanTpuError
from wan_tpu.lora import lora_of
from wan_tpu.media.image import decode_image, load_image

# What an adapter is read from: its weights, and what peft writes beside them.
_ADAPTER_ENDING, _ADAPTER_CONFIG = ".safetensors", "adapter_config.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """An image as it was when the manifest was read.

    location  absolute path or gs://
    sha256    of the file
    """

    location: str
    sha256: str
    height: int
    width: int

    def load(self, field: str) -> Image.Image:
        """Return the image's pixels; raises `WanTpuError` when it has gone since, or is another; field: for people."""
        image, sha256 = _load(self.location)
        if sha256 != self.sha256:
            raise InvalidInput(f"{field} {self.location} has changed since the manifest was read; run the batch again")
        return image


_Stamps = tuple[tuple[str, int, int, int], ...]  # of files: path, inode, bytes, nanoseconds of the last change


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A video or an adapter as it was when the manifest was read.

    location  absolute path, gs:// or hub id
    version   another one when its content is another: a checksum, generations in a bucket, a commit of the hub
    stamps    of its files here: while they are the same, the content isn't read again
    """

    location: str
    version: str
    stamps: _Stamps = ()

    def check(self) -> None:
        """Raise `InvalidInput` when it isn't any more what it was; of what isn't on this machine nothing is known."""
        if not self.stamps or _stamps(_files(self.location)) == self.stamps:
            return
        now = identify(self.location)
        if now is None or now.version != self.version:
            raise InvalidInput(f"{self.location} has changed since the manifest was read; run the batch again")


def read_picture(location: str) -> Picture | str:
    """Return what an image is, or why it can't be read."""
    try:
        image, sha256 = _load(location)
    except WanTpuError as error:
        return str(error)
    return Picture(location, sha256, image.height, image.width)


def identify(location: str) -> Source | None:
    """Return what tells the content of a video or an adapter from another one at the same place.

    Returns:
        None where this machine can't tell: it isn't here, or the hub's commit isn't known.

    Raises:
        Unavailable: The bucket doesn't answer now.
    """
    if location.startswith(GCS_SCHEME):
        generations = _generations(location)
        return Source(location, f"generation {' '.join(generations)}") if generations else None
    try:
        if files := _files(location):
            stamps = _stamps(files)
            return Source(location, f"sha256 {_checksum(files)}", stamps)
    except OSError:
        return None
    commit = _hub_commit(location)
    return None if commit is None else Source(location, f"commit {commit}")


def resolve_image(image: object, folder: str) -> str:
    """Return an image's absolute path or gs:// address; a relative one begins at `folder`. Raises `InvalidInput`."""
    if not isinstance(image, str) or not image:
        raise InvalidInput(f"has the image {image!r}; give a path or gs:// address")
    if "://" in image or image.startswith("/"):
        return image
    if not folder.startswith(GCS_SCHEME):
        return str(Path(folder, image))
    bucket, _, path = folder.removeprefix(GCS_SCHEME).partition("/")
    joined = posixpath.normpath(posixpath.join(path, image))
    if joined.startswith(".."):
        raise InvalidInput(
            f"has the image {image!r}, which is outside of the bucket {bucket!r}; give its gs:// address"
        )
    return f"{GCS_SCHEME}{bucket}/{joined}"


def resolve_adapter(lora: object, folder: str) -> object:
    """Return an adapter, its path absolute where it lies below the manifest's folder."""
    if isinstance(lora, str | dict):
        adapter = lora_of(lora)
        if not os.path.isabs(adapter.path) and os.path.exists(path := posixpath.join(folder, adapter.path)):
            return dataclasses.asdict(dataclasses.replace(adapter, path=path))
    return lora


def read_bytes(location: str) -> bytes:
    """Return a whole file, local or gs://; raises `StorageError`."""
    folder, name = split_location(location)
    if location.startswith(GCS_SCHEME):
        return open_storage(folder).read(name)
    try:
        return Path(location).read_bytes()
    except (OSError, ValueError) as error:
        raise explain(error, location) from None


def explain(error: OSError | ValueError, location: str) -> StorageError:
    """Return why a file can't be read, as an error for people."""
    reason = getattr(error, "strerror", None) or error
    return StorageError(f"can't read {location} ({reason}); check the path and its permissions")


def _load(location: str) -> tuple[Image.Image, str]:
    """Return an image, and the SHA-256 of its file."""
    if location.startswith(GCS_SCHEME) or os.path.isfile(location):  # unlike Path.is_file, false for a name too long
        content = read_bytes(location)
        return decode_image(io.BytesIO(content), location), hashlib.sha256(content).hexdigest()
    return load_image(location), ""  # which says what is wrong


def _files(location: str) -> list[Path]:
    """Return the files here that a video or an adapter is read from; none where it isn't here."""
    path = Path(location)
    if path.is_dir():
        return [*sorted(path.glob(f"*{_ADAPTER_ENDING}")), *path.glob(_ADAPTER_CONFIG)]
    if not path.is_file():
        return []
    return [path, *(path.parent.glob(_ADAPTER_CONFIG) if path.suffix == _ADAPTER_ENDING else ())]


def _stamps(files: Iterable[Path]) -> _Stamps:
    found = [(str(file), file.stat()) for file in files]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _checksum(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file; of several, that of their names and checksums."""
    checksums = []
    for path in files:
        with path.open("rb") as file:
            checksums.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(files) == 1:
        return checksums[0]
    named = [f"{file.name} {checksum}\n" for file, checksum in zip(files, checksums, strict=True)]
    return hashlib.sha256("".join(named).encode()).hexdigest()


def _generations(location: str) -> list[str]:
    """Return the generations of the objects that an adapter is read from; none where this machine may not look."""
    folder, _, name = location.rpartition("/")
    single = name.endswith(_ADAPTER_ENDING)
    try:
        objects = BucketFolder(folder if single else location).files("*")
    except CheckpointError:
        return []
    if single:
        wanted = [other for other in (name, _ADAPTER_CONFIG) if other in objects]
    else:
        wanted = [other for other in sorted(objects) if other.endswith(_ADAPTER_ENDING) and "/" not in other]
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
