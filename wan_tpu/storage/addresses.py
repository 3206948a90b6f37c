"""Tell bucket addresses from local paths. It imports nothing heavy, so that every command may use it."""

from pathlib import Path

SCHEMES = ("gs://", "s3://")  # Each with a class in `wan_tpu.storage.opening`.
# Where the requester pays: the variable with the project that pays, of Google's clients, and GDAL's with "requester".
PAYERS = {"gs://": "GOOGLE_CLOUD_QUOTA_PROJECT", "s3://": "AWS_REQUEST_PAYER"}
KINDS = " or ".join(SCHEMES)
FORMS, FILE_FORMS = (" or ".join(f"{scheme}bucket/{rest}" for scheme in SCHEMES) for rest in ("prefix", "name"))


def is_bucket(location: str) -> bool:
    """Return whether a location is the address of a bucket or of something in a bucket."""
    return location.startswith(SCHEMES)


def split_bucket(address: str) -> tuple[str, str, str]:
    """Return an address's scheme, the name of its bucket, and what follows."""
    scheme, _, rest = address.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme}://", bucket, path


def split_location(location: str) -> tuple[str, str]:
    """Split the location of a file into its folder or prefix, for `open_storage`, and its name there."""
    if is_bucket(location):
        scheme, bucket, path = split_bucket(location)
        folder, _, name = path.rpartition("/")
        return scheme + "/".join(part for part in (bucket, folder) if part), name
    path_ = Path(location)
    return str(path_.parent), path_.name


def absolute(location: str) -> str:
    """Return a path that means the same in every working folder; addresses and "" are returned unchanged."""
    if not location or "://" in location or is_damaged(location):
        return location
    return str(Path(location).expanduser().absolute())


def is_damaged(location: str) -> bool:
    """Return whether it is an address that went through `Path`, which collapses two slashes into one."""
    return location.startswith(tuple(scheme.removesuffix("//") for scheme in SCHEMES)) and not is_bucket(location)
