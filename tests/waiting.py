"""How long tests wait: a wait that ends well costs nothing, so one limit serves all of them, on slow machines too."""

import time
from collections.abc import Callable
from typing import TypeVar

SECONDS = 600  # that anything may take on a busy machine, a slice lost and built again included

Found = TypeVar("Found")


def wait_for(find: Callable[[], Found], awaited: str = "it") -> Found:
    """Return what a function finds as soon as it finds something."""
    give_up = time.monotonic() + SECONDS
    while not (value := find()):
        assert time.monotonic() < give_up, f"{awaited} doesn't come in {SECONDS} s"
        time.sleep(0.02)
    return value
