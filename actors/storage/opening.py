"""Open the storage at an address: a folder, or gs://bucket/prefix."""

from pathlib import Path

from actors.storage.base import GCS_SCHEME, Storage
from actors.storage.local import LocalStorage
from wan_tpu.errors import InvalidInput


def open_storage(location: str | Path) -> Storage:
    """Return the storage at a folder (made when first written to) or gs://bucket/prefix.

    Raises `InvalidInput` for any other scheme, `StorageError` where Google credentials are missing.
    """
    text = str(location)
    if text.startswith(GCS_SCHEME):
        from actors.storage.gcs import GcsStorage  # here, so that a folder needs no cloud client (0.5 s)

        bucket, _, prefix = text.removeprefix(GCS_SCHEME).partition("/")
        return GcsStorage(bucket, prefix)
    if "://" in text or text.startswith("gs:"):  # a gs:// address that went through Path has one slash left
        raise InvalidInput(f"{text} is neither a folder nor gs://bucket/prefix; give one of these")
    if not text:
        raise InvalidInput("the folder's path is empty; give a folder ('.' for this one) or gs://bucket/prefix")
    return LocalStorage(text)


def absolute(location: str) -> str:
    """Return a path that means the same in every working folder; an address, or nothing, as it is."""
    if not location or "://" in location or location.startswith("gs:"):
        return location
    return str(Path(location).expanduser().absolute())


def split_location(location: str) -> tuple[str, str]:
    """Return (folder or gs:// prefix, name) of one file: what `open_storage(folder)` then reads."""
    if location.startswith(GCS_SCHEME):
        bucket, _, path = location.removeprefix(GCS_SCHEME).partition("/")
        folder, _, name = path.rpartition("/")
        return GCS_SCHEME + "/".join(part for part in (bucket, folder) if part), name
    path_ = Path(location)
    return str(path_.parent), path_.name
