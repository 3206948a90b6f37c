"""Sizes with a length on the command line."""

import re

from wan_tpu.errors import InvalidInput
from wan_tpu.request import parse_size

WITH_FRAMES = "WIDTHxHEIGHTxFRAMES"


def read_size_with_frames(option: str, text: str) -> tuple[int, int, int]:
    """Return the (height, width, frames) that an option asks for; raises `InvalidInput`."""
    size, _, frames = text.rpartition("x")
    if "x" not in size or not re.fullmatch("[0-9]{1,5}", frames, re.ASCII):
        raise InvalidInput(f"{option} {text[:40]}: give {WITH_FRAMES}, such as 1280x720x81")
    return *parse_size(size), int(frames)
