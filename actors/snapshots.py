"""States of unfinished requests, kept where they survive the slice that made them.

One object a request and step, "ID/0012.safetensors"; the newest counts, older ones are deleted when it is whole.
"""

import re

from actors.payloads import Payload, pack
from actors.storage import Missing, open_storage
from wan_tpu.data import DenoiseState, dump_value, parse_value


class Snapshots:
    """All snapshots of a pipeline."""

    def __init__(self, location: str) -> None:
        """location: a folder or gs://bucket/prefix."""
        self._storage = open_storage(location)

    def newest(self, request: str) -> int | None:
        """Return after which step the newest snapshot of a request was taken; None when there is none."""
        return max(self._steps(request), default=None)

    def save(self, request: str, step: int, state: DenoiseState) -> None:
        """Keep a state and delete those before it."""
        self._storage.write(_name(request, step), dump_value(state))
        self._delete(request, [known for known in self._steps(request) if known < step])

    def load(self, request: str, step: int) -> Payload:
        """Return a snapshot; raises `Missing` when it is gone."""
        name = _name(request, step)
        value, _ = parse_value(DenoiseState, self._storage.read(name), self._storage.location(name))
        return pack(value)

    def delete(self, request: str) -> None:
        """Delete all snapshots of a request."""
        self._delete(request, self._steps(request))

    def _steps(self, request: str) -> list[int]:
        found = (re.fullmatch(r".*/(\d+)\.safetensors", name) for name in self._storage.list(f"{request}/"))
        return [int(match[1]) for match in found if match]

    def _delete(self, request: str, steps: list[int]) -> None:
        for step in steps:
            self._storage.delete(_name(request, step))


def _name(request: str, step: int) -> str:
    return f"{request}/{step:04d}.safetensors"


__all__ = ["Missing", "Snapshots"]
