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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from actors.errors import StageLost
from actors.slices.async_slice import AsyncSlice, to_the_end
from actors.slices.messages import SliceRequest
from actors.slices.payloads import Payload, pack, unpack
from actors.slices.references import ObjectStore
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.errors import InvalidInput, Unavailable
from wan_tpu.identity import identify
from wan_tpu.request import IMAGES, ResolvedRequest
from wan_tpu.storage.base import MAX_PART_BYTES, Missing, Storage, StorageError
from wan_tpu.storage.opening import open_storage

log = logging.getLogger(__name__)

T = TypeVar("T")
PARTIAL_S = 3600.0  # after which nobody goes on writing a file that isn't whole
_WRITERS = 8  # Threads that storage may keep waiting; a slice's calls have others.
_FINISHED_S = 60.0  # A driver may take this long to say whether its request is finished; else an orphan stays.
_LONGEST_ID = MAX_PART_BYTES - len(f".{'0' * 16}.0000.safetensors")  # Bytes that are left of a file's name.
NAME = re.compile(r"(?P<id>.+)\.[0-9a-f]{16}\.(?P<step>\d+)\.safetensors")


def name_of(id: str, request: ResolvedRequest, model: str) -> str:
    """Return the name of a request's snapshots.

    Reads the files of its video and adapters, or asks their bucket, so it may block: call it in a thread.

    Args:
        id: The request's id.
        request: All that decides its states, but for the model.
        model: What makes its states besides, such as checkpoint and dtype.
    """
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    images = [fields.pop(name) for name in IMAGES]
    digest = hashlib.sha256(json.dumps([model, fields], sort_keys=True, default=str).encode())
    for image in images:
        if image is not None:
            digest.update(f"{image.mode} {image.size}".encode() + image.tobytes())
    named = [lora.path for lora in request.loras] + ([] if request.video is None else [str(request.video)])
    if versions := {path: version for path in named if (version := _version_of(path)) is not None}:
        digest.update(json.dumps(versions, sort_keys=True).encode())
    return f"{stem_of(id)}.{digest.hexdigest()[:16]}"


def _version_of(path: str) -> str | None:
    """Return the version of a video's or an adapter's content; None where this process can't tell.

    A source that doesn't answer now fails no request: its hosts may reach it, and if they can't, they say so. The name
    has the path alone then. A run that knows the version begins anew, which costs steps and mixes nothing.
    """
    try:
        source = identify(path)
    except Unavailable as error:
        log.warning("snapshots are named without the version of %s: %s", path, error)
        return None
    return None if source is None else source.version


class Snapshots:
    """All snapshots of a pipeline. `request`: the name that `name_of` makes."""

    def __init__(self, location: str | Storage) -> None:
        """location: a folder or gs://bucket/prefix."""
        self._storage = open_storage(location) if isinstance(location, str) else location

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

    def delete(self, request: str) -> None:
        """Delete all snapshots of a request."""
        for step in self._steps(request):
            self.forget(request, step)

    def delete_all_of(self, id: str) -> None:
        """Delete all snapshots of an id, whatever they were of."""
        for name in self.names(id):
            self._storage.delete(name)

    def clean(self) -> None:
        """Remove what a killed leader left half written, if that can be done now; a snapshot takes seconds."""
        try:
            self._storage.clean(PARTIAL_S)
        except StorageError as error:
            log.warning("half written snapshots stay: %s", error)

    def stems(self) -> list[str]:
        """Return what stands for the ids that have snapshots (`stem_of`)."""
        return sorted({found["id"] for name in self._storage.list() if (found := NAME.fullmatch(name))})

    def names(self, id: str) -> list[str]:
        """Return the names of all snapshots of an id, in the storage."""
        stem = stem_of(id)
        listed = self._storage.list(f"{stem}.")
        return [name for name in listed if (found := NAME.fullmatch(name)) and found["id"] == stem]

    def _steps(self, request: str) -> list[int]:
        return [int(found["step"]) for name in self._storage.list(f"{request}.") if (found := NAME.fullmatch(name))]


def stem_of(id: str) -> str:
    """Return what stands for an id in a file's name: itself, or its beginning and a digest where it is too long."""
    content = id.encode()
    if len(content) <= _LONGEST_ID:
        return id
    start = content[: _LONGEST_ID - 33].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(content).hexdigest()[:32]}"


def delete_snapshots(delete: Callable[[str], None], of: str) -> None:
    """Delete snapshots of a request that has ended; where storage doesn't answer they stay, as orphans."""
    try:
        delete(of)
    except StorageError as error:
        log.warning("%s: its snapshots stay: %s", of, error)


class Snapshotter:
    """Copies states out of one slice and saves them, while steps go on. `held`: a request's name on the hosts."""

    def __init__(
        self,
        slice_: AsyncSlice,
        snapshots: Snapshots,
        store: ObjectStore,
        staying: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """staying: entered while something is being written, for its leader not to end meanwhile."""
        self._slice, self._snapshots, self._store, self._staying = slice_, snapshots, store, staying
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="snapshots")
        self._copying: dict[str, asyncio.Task[None]] = {}  # by the name on the hosts
        self._writing: dict[str, asyncio.Task[None]] = {}  # by the name of the request's snapshots

    def start(self, held: str, request: SliceRequest, *, skip: bool = True) -> None:
        """Copy the state out and save it while steps go on; skip: not while the one before is still being saved."""
        before = self._copying.get(held)
        if not skip or (before is None and request.snapshots not in self._writing):
            self._copying[held] = asyncio.create_task(self._copy(held, request, before))

    async def settle(self, held: str) -> None:
        """Wait until no copy of it is under way; what was copied is written afterwards, too."""
        while (copying := self._copying.get(held)) is not None:
            await asyncio.wait([copying])

    async def take(self, held: str, request: SliceRequest) -> int | None:
        """Save the state before this returns; return after which step it was taken, None when it isn't saved."""
        step, ref = await self._slice.save("snapshot", held)
        return step if await self._write(request, step, ref) else None

    def keep(self, request: SliceRequest, step: int, ref: Any) -> None:
        """Save a state that was copied out already, beside whatever its request does next."""
        name = request.snapshots
        task = asyncio.create_task(self._write_after(self._writing.get(name), request, step, ref))
        self._writing[name] = task
        task.add_done_callback(lambda done: self._writing.pop(name) if self._writing.get(name) is done else None)

    async def load(self, name: str, step: int) -> Any:
        """Put a snapshot into the object store; raises `StageLost` when it can't be used: a newer one may be there."""
        return await self._in_thread(self._read, name, step)

    async def _copy(self, held: str, request: SliceRequest, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            step, ref = await self._slice.save("snapshot", held)
            self.keep(request, step, ref)
        except Exception as error:  # a snapshot is insurance: the request goes on without
            log.warning("no snapshot of %s: %s", held, error)
        finally:
            if self._copying.get(held) is asyncio.current_task():
                del self._copying[held]

    async def _write_after(self, before: asyncio.Task[None] | None, request: SliceRequest, step: int, ref: Any) -> None:
        with self._staying():
            if before is not None:
                await asyncio.wait([before])
            await self._write(request, step, ref)

    async def _write(self, request: SliceRequest, step: int, ref: Any) -> bool:
        """Save a state; return whether it is: without, its request goes on all the same."""
        try:
            await self._in_thread(self._save, request, step, ref)
            if await _is_finished(request):  # its snapshots were deleted while this one was being written
                await self._in_thread(self._snapshots.forget, request.snapshots, step)
                return False
        except Exception as error:
            log.warning("no snapshot of %s after step %d: %s", request.snapshots, step, error)
            return False
        return True

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, function, *args))

    def _save(self, request: SliceRequest, step: int, ref: Any) -> None:
        state = unpack(self._store.get(ref))
        assert isinstance(state, DenoiseState)
        self._snapshots.save(request.snapshots, step, state)

    def _read(self, name: str, step: int) -> Any:
        try:
            return self._store.put(self._snapshots.load(name, step))
        except Missing:
            raise StageLost(f"the snapshot after step {step} of {name} has been replaced by a newer one") from None
        except StorageError as away:  # it is there, for all that is known
            raise StageLost(f"a snapshot can't be read now: {away}") from None
        except InvalidInput as damaged:
            with contextlib.suppress(StorageError):  # it is found damaged again
                self._snapshots.forget(name, step)
            raise StageLost(f"a snapshot can't be used and was deleted: {damaged}") from None


async def _is_finished(request: SliceRequest) -> bool:
    """Whether nobody will resume a request; False where its driver doesn't say."""
    try:
        async with asyncio.timeout(_FINISHED_S):
            return await request.scope.is_finished()
    except Exception:
        return False


def _name(request: str, step: int) -> str:
    return f"{request}.{step:04d}.safetensors"
