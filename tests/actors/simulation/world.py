"""One simulated world: its clock, its random numbers, its processes, and the record of what happened."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from tests.actors.simulation.virtual_time import VirtualTime

SECONDS = {"encode_text": 0.1, "encode_image": 0.3, "begin": 0.05, "step": 1.0, "decode": 0.5, "load": 2.0}
SECONDS |= {"take_fragments": 0.15}
COPY_S = 0.02  # The duration of a call that copies arrays to or from devices.
CALL_S = 0.002  # The duration of a message between processes.


class Process:
    """A process, which can be killed."""

    def __init__(self, loop: VirtualTime, name: str) -> None:
        self.loop, self.name, self.dead = loop, name, False

    def check_thread(self) -> None:
        """Return if the process is alive; otherwise stop the calling thread for ever."""
        if self.dead:
            self.loop.wait_for_ever()


class World:
    """One run: its clock, its random numbers, the record of what happened, and what is currently broken."""

    def __init__(self, loop: VirtualTime, seed: int) -> None:
        self.loop, self.random = loop, random.Random(seed)
        # Seconds of each call. A function is called with what the host holds and the call's arguments.
        self.seconds: dict[str, float | Callable[..., float]] = dict(SECONDS)
        self.story: list[tuple[float, str]] = []
        self.steps: dict[str, list[tuple[int, float, str]]] = defaultdict(list)  # By request: (step, time, slice).
        self.decoded: dict[str, list[tuple[int, float, str]]] = defaultdict(list)  # By request: (chunks, time, slice).
        self.drawn_ahead: dict[str, int] = defaultdict(int)  # By request: decoders that had their noise already.
        self.excuses: dict[str, list[tuple[float, str]]] = defaultdict(list)  # Reasons for repeated steps, by request.
        self.hub_is_down = False
        self.ray_is_silent_until_s = 0.0
        self.hung_until_s = 0.0  # When the last hung call is given up.

    def tell(self, text: str) -> None:
        """Record an event."""
        self.story.append((self.loop.now, text))

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Schedule a function call."""
        self.loop.call_later(seconds, function)


def digest(*parts: object) -> bytes:
    """Return a digest that stands for a result and depends on all of its inputs."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def array(content: bytes) -> np.ndarray:
    """Return bytes as an array."""
    return np.frombuffer(content, np.uint8)
