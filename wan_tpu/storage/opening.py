"""Open the storage at a location: a folder, or a bucket of a service that is known here."""

from pathlib import Path

from wan_tpu.errors import InvalidInput
from wan_tpu.storage.addresses import FORMS, is_bucket, is_damaged, split_bucket
from wan_tpu.storage.base import BucketStorage, Storage
from wan_tpu.storage.local import LocalStorage


def open_storage(location: str | Path, *, private: bool = True) -> Storage:
    """Return the storage at a folder (made when first written to) or an address of a bucket.

    Args:
        location: The path, or the address.
        private: Whether files in a folder are readable by their user only; a bucket has its own rules.

    Raises:
        InvalidInput: The address has another scheme.
        StorageError: Credentials are missing.
    """
    text = str(location)
    if is_bucket(text):
        return open_bucket(text)
    if "://" in text or is_damaged(text):
        raise InvalidInput(f"{text} is neither a folder nor {FORMS}; give one of these")
    if not text:
        raise InvalidInput(f"the folder's path is empty; give a folder ('.' for this one), {FORMS}")
    return LocalStorage(text, private=private)


def open_bucket(address: str) -> BucketStorage:
    """Return the storage at an address of a bucket; raises as `open_storage`."""
    scheme, bucket, prefix = split_bucket(address)
    return _class_of(scheme)(bucket, prefix)


def _class_of(scheme: str) -> type[BucketStorage]:
    """Return the class of a scheme; clients are imported here, since each takes half a second."""
    if scheme == "gs://":
        from wan_tpu.storage.gcs import GcsStorage

        return GcsStorage
    from wan_tpu.storage.s3 import S3Storage

    return S3Storage
