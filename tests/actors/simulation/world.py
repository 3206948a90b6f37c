"""One simulated world: its time, its chance, its processes, and what has happened in it."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from tests.actors.simulation.virtual_time import VirtualTime

SECONDS = {"encode_text": 0.1, "encode_image": 0.3, "begin": 0.05, "step": 1.0, "decode": 0.5, "load": 2.0}
SECONDS |= {"take_fragments": 0.15}
COPY_S = 0.02  # of what moves arrays onto devices or off them
CALL_S = 0.002  # of a message between processes


class Process:
    """Something that can be killed."""

    def __init__(self, loop: VirtualTime, name: str) -> None:
        self.loop, self.name, self.dead = loop, name, False

    def check_thread(self) -> None:
        """Never return to a thread of a process that is dead."""
        if self.dead:
            self.loop.wait_for_ever()


class World:
    """One run: its time, its chance, what has happened in it, and what doesn't work at the moment."""

    def __init__(self, loop: VirtualTime, seed: int) -> None:
        self.loop, self.random = loop, random.Random(seed)
        # A function gets what the host holds, and the arguments of the call.
        self.seconds: dict[str, float | Callable[..., float]] = dict(SECONDS)
        self.story: list[tuple[float, str]] = []
        self.steps: dict[str, list[tuple[int, float, str]]] = defaultdict(list)  # request -> step, when, slice
        self.decoded: dict[str, list[tuple[int, float, str]]] = defaultdict(list)  # request -> chunks, when, slice
        self.excuses: dict[str, list[tuple[float, str]]] = defaultdict(list)  # why steps of a request may be repeated
        self.hub_is_down = False
        self.ray_is_silent_until_s = 0.0
        self.hung_until_s = 0.0  # When the last call that hangs is given up.

    def tell(self, text: str) -> None:
        """Note what has happened."""
        self.story.append((self.loop.now, text))

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Have something happen."""
        self.loop.call_later(seconds, function)


def digest(*parts: object) -> bytes:
    """Return what stands for a result: it depends on everything that it was made of."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def array(content: bytes) -> np.ndarray:
    """Return bytes as an array."""
    return np.frombuffer(content, np.uint8)
