"""Wait in tests. All tests share one generous time limit, which suits slow machines and costs fast ones nothing."""

import time
from collections.abc import Callable
from typing import TypeVar

SECONDS = 400  # Allows for much on a busy machine, including a lost slice that is built again.

Found = TypeVar("Found")


def wait_for(find: Callable[[], Found], awaited: str = "it", pause_s: float = 0.02) -> Found:
    """Call a function until it returns something, with pauses, and return that."""
    give_up = time.monotonic() + SECONDS
    while not (value := find()):
        assert time.monotonic() < give_up, f"{awaited} doesn't come in {SECONDS} s"
        time.sleep(pause_s)
    return value
