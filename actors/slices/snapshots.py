"""States of unfinished requests, kept where they survive the slice that made them.

One object a request and step, "ID.DIGEST.0012.safetensors"; the newest counts, older ones are deleted when it is whole.
A request is known by its id and by a digest of all that decides its states: an id that is used again, for something
else, doesn't go on from them.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import re

import ray

from actors.errors import StageLost
from actors.slices.async_slice import AsyncSlice
from actors.slices.payloads import Payload, pack, unpack
from actors.storage.base import Missing, StorageError
from actors.storage.opening import open_storage
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.errors import InvalidInput
from wan_tpu.request import IMAGES, ResolvedRequest

log = logging.getLogger(__name__)

PARTIAL_S = 3600.0  # after which nobody goes on writing a file that isn't whole
NAME = re.compile(r"(?P<id>.+)\.[0-9a-f]{16}\.(?P<step>\d+)\.safetensors")


def name_of(id: str, request: ResolvedRequest, model: str) -> str:
    """Return the name of a request's snapshots; model: what makes its states besides, such as checkpoint and dtype."""
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    images = [fields.pop(name) for name in IMAGES]
    digest = hashlib.sha256(json.dumps([model, fields], sort_keys=True, default=str).encode())
    for image in images:
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
        for known in self._steps(request):
            if known < step:
                self.forget(request, known)

    def load(self, request: str, step: int) -> Payload:
        """Return a snapshot; raises `Missing` when it is gone."""
        name = _name(request, step)
        value, _ = parse_value(DenoiseState, self._storage.read(name), self._storage.location(name))
        return pack(value)

    def forget(self, request: str, step: int) -> None:
        """Delete one snapshot."""
        self._storage.delete(_name(request, step))

    def delete(self, id: str) -> None:
        """Delete all snapshots of an id, whatever they were of."""
        for name in self.names(id):
            self._storage.delete(name)

    def clean(self) -> None:
        """Remove what a killed leader left half written, if that can be done now; a snapshot takes seconds."""
        try:
            self._storage.clean(PARTIAL_S)
        except StorageError as error:
            log.warning("half written snapshots stay: %s", error)

    def ids(self) -> list[str]:
        """Return the ids that have snapshots."""
        return sorted({found["id"] for name in self._storage.list() if (found := NAME.fullmatch(name))})

    def names(self, id: str) -> list[str]:
        """Return the names of all snapshots of an id, in the storage."""
        listed = self._storage.list(f"{id}.")
        return [name for name in listed if (found := NAME.fullmatch(name)) and found["id"] == id]

    def _steps(self, request: str) -> list[int]:
        return [int(found["step"]) for name in self._storage.list(f"{request}.") if (found := NAME.fullmatch(name))]


def delete_snapshots(snapshots: Snapshots, id: str) -> None:
    """Delete all snapshots of a request that has ended; where storage doesn't answer they stay, as orphans."""
    try:
        snapshots.delete(id)
    except StorageError as error:
        log.warning("%s: its snapshots stay: %s", id, error)


class Snapshotter:
    """Copies states out of one slice while steps go on. `held`: a request's name there; `name`: of its snapshots."""

    def __init__(self, slice_: AsyncSlice, snapshots: Snapshots) -> None:
        self._slice, self._snapshots = slice_, snapshots
        self._saving: dict[str, asyncio.Task[None]] = {}

    def start(self, held: str, name: str, *, skip: bool = True) -> None:
        """Copy the state out and save it while steps go on; skip: not while the one before is still being saved."""
        before = self._saving.get(held)
        if before is None or before.done() or not skip:
            self._saving[held] = asyncio.create_task(self._save(held, name, before))

    async def settle(self, held: str) -> None:
        """Wait until no copy of it is under way."""
        if held in self._saving:
            await asyncio.wait([self._saving.pop(held)])

    async def take(self, held: str, name: str) -> int | None:
        """Save the state before this returns; return after which step it was taken, None when it isn't saved."""
        step, ref = await self._slice.side("snapshot", held)
        return step if await self.save(name, step, ref) else None

    async def save(self, name: str, step: int, ref: ray.ObjectRef) -> bool:
        """Save a state that was copied out already; return whether it is: without, its request goes on all the same."""
        try:
            await self._slice.run(self._write, name, step, ref)
        except StorageError as error:
            log.warning("no snapshot of %s after step %d: %s", name, step, error)
            return False
        return True

    async def load(self, name: str, step: int) -> ray.ObjectRef:
        """Put a snapshot into the object store; raises `StageLost` when it can't be used: a newer one may be there."""
        return await self._slice.run(self._read, name, step)

    async def _save(self, held: str, name: str, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            await self.take(held, name)
        except Exception:  # a snapshot is insurance: the request goes on without
            log.exception("no snapshot of %s", held)

    def _write(self, name: str, step: int, ref: ray.ObjectRef) -> None:
        self._snapshots.save(name, step, unpack(ray.get(ref)))  # type: ignore[arg-type]

    def _read(self, name: str, step: int) -> ray.ObjectRef:
        try:
            return ray.put(self._snapshots.load(name, step))
        except Missing:
            raise StageLost(f"the snapshot after step {step} of {name} has been replaced by a newer one") from None
        except StorageError as away:  # it is there, for all that is known
            raise StageLost(f"a snapshot can't be read now: {away}") from None
        except InvalidInput as damaged:
            with contextlib.suppress(StorageError):  # it is found damaged again
                self._snapshots.forget(name, step)
            raise StageLost(f"a snapshot can't be used and was deleted: {damaged}") from None


def _name(request: str, step: int) -> str:
    return f"{request}.{step:04d}.safetensors"
