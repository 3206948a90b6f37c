"""States of unfinished requests, kept where they survive the slice that made them.

One object a request and step, "ID.DIGEST.0012.safetensors"; the newest counts, older ones are deleted when it is whole.
A request is known by its id and by a digest of all that decides its states: an id that is used again, for something
else, doesn't go on from them.
"""

import dataclasses
import hashlib
import json
import re

from actors.payloads import Payload, pack
from actors.storage import Missing, open_storage
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.request import ResolvedRequest


def name_of(id: str, request: ResolvedRequest, model: str) -> str:  # noqa: A002
    """Return the name of a request's snapshots; model: what makes its states besides, such as checkpoint and dtype."""
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    image = fields.pop("image")
    digest = hashlib.sha256(json.dumps([model, fields], sort_keys=True, default=str).encode())
    if image is not None:
        digest.update(f"{image.mode} {image.size}".encode() + image.tobytes())
    return f"{id}.{digest.hexdigest()[:16]}"


class Snapshots:
    """All snapshots of a pipeline. `request`: the name that `name_of` makes."""

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

    def forget(self, request: str, step: int) -> None:
        """Delete one snapshot."""
        self._delete(request, [step])

    def delete(self, id: str) -> None:  # noqa: A002
        """Delete all snapshots of an id, whatever they were of."""
        for name in self.names(id):
            self._storage.delete(name)

    def ids(self) -> list[str]:
        """Return the ids that have snapshots."""
        form = re.compile(r"(.+)\.[0-9a-f]{16}\.\d+\.safetensors")
        return sorted({found[1] for name in self._storage.list() if (found := form.fullmatch(name))})

    def names(self, id: str) -> list[str]:  # noqa: A002
        """Return the names of all snapshots of an id, in the storage."""
        mine = re.compile(re.escape(id) + r"\.[0-9a-f]{16}\.\d+\.safetensors")
        return [name for name in self._storage.list(f"{id}.") if mine.fullmatch(name)]

    def _steps(self, request: str) -> list[int]:
        found = (re.fullmatch(r".*\.(\d+)\.safetensors", name) for name in self._storage.list(f"{request}."))
        return [int(match[1]) for match in found if match]

    def _delete(self, request: str, steps: list[int]) -> None:
        for step in steps:
            self._storage.delete(_name(request, step))


def _name(request: str, step: int) -> str:
    return f"{request}.{step:04d}.safetensors"


__all__ = ["Missing", "Snapshots", "name_of"]
