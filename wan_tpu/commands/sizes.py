"""Sizes on the command line: WIDTHxHEIGHT. HEIGHT*WIDTH is accepted, too, with a note that says which side is which."""

import re
import sys

from wan_tpu.errors import InvalidInput
from wan_tpu.request import parse_size

WITH_FRAMES = "WIDTHxHEIGHTxFRAMES"
_STARRED = re.compile(r"([0-9]+)\*([0-9]+)(?:\*([0-9]+))?", re.ASCII)


def read_size(option: str, text: str) -> tuple[int, int]:
    """Return the (height, width) that an option asks for; raises `InvalidInput`."""
    return parse_size(_with_x(option, text))


def read_size_with_frames(option: str, text: str) -> tuple[int, int, int]:
    """Return the (height, width, frames) that an option asks for; raises `InvalidInput`."""
    size, _, frames = _with_x(option, text).rpartition("x")
    if "x" not in size or not re.fullmatch("[0-9]{1,5}", frames, re.ASCII):
        raise InvalidInput(f"{option} {text[:40]}: give {WITH_FRAMES}, such as 1280x720x81")
    return *parse_size(size), int(frames)


def _with_x(option: str, text: str) -> str:
    """Return a size with its width first; if it could be misread, say on stderr which side is which."""
    match = _STARRED.fullmatch(text)
    if match is None:
        return text
    height, width, frames = match.groups()
    plain = "x".join(filter(None, (width, height, frames)))
    print(
        f"{option} {text} is HEIGHT*WIDTH here: {width} wide and {height} high. Wan's own program reads it as "
        f"WIDTH*HEIGHT; {plain} can't be mistaken",
        file=sys.stderr,
    )
    return plain
