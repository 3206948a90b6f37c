"""Prepare the streamer that reads weights from buckets, and determine what it can't read."""

import os

from wan_tpu.storage.addresses import PAYERS, is_bucket, split_bucket

_client: dict[str, str] = {}  # The scheme that the streamer has a client of in this process.


def can_stream(location: str) -> bool:
    """Return whether the streamer can read a path or address in this process, after setting its environment.

    Its C++ clients use another variable instead of STORAGE_EMULATOR_HOST, and AWS_ENDPOINT_URL with buckets in paths.
    They never send who pays, even if the variables for that are set. The library loads the client of only one service,
    the first one used, and treats every bucket as that service's.
    """
    if not is_bucket(location):
        return True
    scheme = split_bucket(location)[0]
    if os.environ.get(PAYERS.get(scheme, "")):
        return False
    if "STORAGE_EMULATOR_HOST" in os.environ:
        os.environ["CLOUD_STORAGE_EMULATOR_ENDPOINT"] = os.environ["STORAGE_EMULATOR_HOST"]
    if "AWS_ENDPOINT_URL" in os.environ:  # Services other than Amazon's put buckets in paths, not in host names.
        os.environ.setdefault("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")
    return _client.setdefault("scheme", scheme) == scheme
