"""Find and read the files that lines of a manifest name."""

import dataclasses
import hashlib
import io
import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from wan_tpu.errors import InvalidInput, WanTpuError
from wan_tpu.media.image import decode_image, load_image
from wan_tpu.media.video_content import VideoContent
from wan_tpu.requested_adapter import parse_adapter
from wan_tpu.storage.addresses import KINDS, is_bucket, split_bucket, split_location
from wan_tpu.storage.base import StorageError
from wan_tpu.storage.opening import open_storage


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """An image file as it was when the manifest was read."""

    location: str  # An absolute path, or an address in a bucket.
    sha256: str
    height: int
    width: int

    def load(self, field: str) -> Image.Image:
        """Return the image's pixels.

        Raises:
            WanTpuError: The file is gone or has changed since the manifest was read.
        """
        image, sha256 = _load(self.location)
        if sha256 != self.sha256:
            raise InvalidInput(f"{field} {self.location} has changed since the manifest was read; run the batch again")
        return image


def read_picture(location: str) -> Picture | str:
    """Return an image file's size and digest, or the reason why it can't be read."""
    try:
        image, sha256 = _load(location)
    except WanTpuError as error:
        return str(error)
    return Picture(location, sha256, image.height, image.width)


def resolve_image(image: object, folder: str) -> str:
    """Return an image's absolute path, relative ones starting at `folder`, or its address; raises `InvalidInput`."""
    if not isinstance(image, str) or not image:
        raise InvalidInput(f"has the image {image!r}; give a path, or an address in {KINDS}")
    if "://" in image or image.startswith("/"):
        return image
    if not is_bucket(folder):
        return str(Path(folder, image))
    scheme, bucket, path = split_bucket(folder)
    joined = posixpath.normpath(posixpath.join(path, image))
    if joined.startswith(".."):
        raise InvalidInput(
            f"has the image {image!r}, which lies outside the bucket {bucket!r}; give its {scheme} address"
        )
    return f"{scheme}{bucket}/{joined}"


def resolve_reference(reference: object, folder: str) -> object:
    """Return the fields of a reference, with an absolute path or an address; raises `InvalidInput`."""
    if isinstance(reference, str) and ":" in reference:
        kind, _, source = reference.partition(":")
        reference = {"kind": kind, "source": source}
    if isinstance(reference, dict) and isinstance(reference.get("source"), str):
        return reference | {"source": resolve_image(reference["source"], folder)}
    return reference  # What it is, `GenerationRequest` says.


def read_files(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a request's fields with the content of what is in buckets, of its video and references, and its digests.

    Raises:
        StorageError: It can't be read.
        InvalidRequest: An image is damaged or too large.
    """
    read, digests = dict(fields), list[str]()

    def open_source(kind: object, source: object) -> object:
        if not isinstance(source, str) or not is_bucket(source):
            return source
        content = read_bytes(source)
        digests.append(hashlib.sha256(content).hexdigest())
        return decode_image(io.BytesIO(content), source) if kind == "image" else VideoContent(content)

    if "video" in read:
        read["video"] = open_source("video", read["video"])
    if isinstance(read.get("references"), list):
        read["references"] = [
            one | {"source": open_source(one.get("kind"), one.get("source"))} if isinstance(one, dict) else one
            for one in read["references"]
        ]
    return read, digests


def resolve_adapter(adapter: object, folder: str) -> object:
    """Return an adapter with an absolute path if its file is below the manifest's folder."""
    if isinstance(adapter, str | dict):
        adapter = parse_adapter(adapter)
        if not os.path.isabs(adapter.path) and os.path.exists(path := posixpath.join(folder, adapter.path)):
            return dataclasses.asdict(dataclasses.replace(adapter, path=path))
    return adapter


def read_bytes(location: str) -> bytes:
    """Return the content of a file, here or in a bucket; raises `StorageError`."""
    folder, name = split_location(location)
    if is_bucket(location):
        return open_storage(folder).read(name)
    try:
        return Path(location).read_bytes()
    except (OSError, ValueError) as error:
        raise explain(error, location) from None


def explain(error: OSError | ValueError, location: str) -> StorageError:
    """Return an error that says why a file can't be read."""
    reason = getattr(error, "strerror", None) or error
    return StorageError(f"can't read {location} ({reason}); check the path and its permissions")


def _load(location: str) -> tuple[Image.Image, str]:
    """Return an image and the SHA-256 of its file."""
    # Unlike Path.is_file, os.path.isfile returns False for a name that is too long.
    if is_bucket(location) or os.path.isfile(location):
        content = read_bytes(location)
        return decode_image(io.BytesIO(content), location), hashlib.sha256(content).hexdigest()
    return load_image(location), ""  # It raises, and says what is wrong.
