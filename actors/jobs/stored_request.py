"""The JSON of a job's request as it lies in the database: every form that there was is read.

    none  (until November 2026) the sizes of a job's images stood in place of the images
    1     they have names of their own

A field that a request gains changes no form: jobs that were stored without it are read without it.
"""

from typing import Any

VERSION = 1
# What a job's request has beside the fields of `wan_tpu.request.GenerationRequest`.
BESIDE = ("model", "seconds", "skipped", "input_size", "last_frame_size")


def to_stored(request: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of a request."""
    return {"version": VERSION, **request}


def from_stored(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored request in the present form, without its version; of a newer form it stays as it is."""
    request = dict(stored)
    if "version" not in request:
        for image, size in (("image", "input_size"), ("last_image", "last_frame_size")):
            if (value := request.pop(image, None)) is not None:
                request[size] = value
    elif request["version"] <= VERSION:
        del request["version"]
    return request
