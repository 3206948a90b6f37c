"""Prepare the streamer that reads weights from buckets, and determine what it can't read."""

import os

from wan_tpu.storage.addresses import is_bucket, split_bucket

_client: dict[str, str] = {}  # The scheme that the streamer has a client of in this process.


def can_stream(location: str) -> bool:
    """Return whether the streamer can read a path or address in this process, after setting its environment.

    Its C++ clients use other variables instead of STORAGE_EMULATOR_HOST, GOOGLE_CLOUD_QUOTA_PROJECT and
    AWS_ENDPOINT_URL. Its library loads the client of only one service, the first one used, and treats every bucket as
    that service's.
    """
    if not is_bucket(location):
        return True
    if "STORAGE_EMULATOR_HOST" in os.environ:
        os.environ["CLOUD_STORAGE_EMULATOR_ENDPOINT"] = os.environ["STORAGE_EMULATOR_HOST"]
    if "GOOGLE_CLOUD_QUOTA_PROJECT" in os.environ:
        os.environ.setdefault("GOOGLE_CLOUD_CPP_USER_PROJECT", os.environ["GOOGLE_CLOUD_QUOTA_PROJECT"])
    if "AWS_ENDPOINT_URL" in os.environ:  # Services other than Amazon's put buckets in paths, not in host names.
        os.environ.setdefault("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")
    scheme = split_bucket(location)[0]
    return _client.setdefault("scheme", scheme) == scheme
