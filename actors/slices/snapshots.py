"""States of unfinished requests, stored where they survive the slice that computed them.

There is one object per request and step, "ID.DIGEST.0012.safetensors". Only the newest is used; older ones are deleted
when it is complete. A request is identified by its id and by a digest of everything that determines its states, so that
another request with the same id doesn't resume from them.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from actors.errors import StageInterrupted
from actors.slices.async_slice import AsyncSlice, wait_despite_cancellation
from actors.slices.messages import SliceRequest
from actors.slices.payloads import Payload, pack, unpack
from actors.slices.references import ObjectStore
from wan_tpu.data import DenoiseState, dump_value, parse_value
from wan_tpu.errors import InvalidInput
from wan_tpu.identity import digest_states
from wan_tpu.request import ResolvedRequest
from wan_tpu.storage.base import MAX_PART_BYTES, Missing, Storage, StorageError
from wan_tpu.storage.opening import open_storage

log = logging.getLogger(__name__)

T = TypeVar("T")
PARTIAL_S = 3600.0  # At this age, an incomplete file counts as abandoned.
_WRITERS = 8  # Threads that may wait for storage. Calls of the slice have threads of their own.
_FINISHED_S = 60.0  # How long a driver may take to say whether its request is finished; then an orphan may remain.
_MAX_ID_BYTES = MAX_PART_BYTES - len(f".{'0' * 16}.0000.safetensors")  # The most bytes of an id in a file's name.
NAME = re.compile(r"(?P<id>.+)\.[0-9a-f]{16}\.(?P<step>\d+)\.safetensors")


def name_of(id: str, request: ResolvedRequest, model: str) -> str:
    """Return the name of a request's snapshots.

    This reads the files of the request's video and adapters, or asks their bucket. It may block, so call it in a
    thread.

    Args:
        id: The request's id.
        request: The request, which determines the states together with the model.
        model: Everything about the model that determines the states, such as checkpoint and dtype.
    """
    return f"{build_stem(id)}.{digest_states(request, model)[:16]}"


class Snapshots:
    """All snapshots of a pipeline. In its methods, `request` is the name that `name_of` returns."""

    def __init__(self, location: str | Storage) -> None:
        """Use the given storage, or open a folder or a bucket."""
        self._storage = open_storage(location) if isinstance(location, str) else location

    def find_newest(self, request: str) -> int | None:
        """Return the number of steps done in the newest snapshot of a request, or None if there is no snapshot."""
        return max(self._list_steps(request), default=None)

    def save(self, request: str, step: int, state: DenoiseState) -> None:
        """Store a state, then delete the request's older ones."""
        self._storage.write(_name(request, step), dump_value(state))
        for older in self._list_steps(request):
            if older < step:
                self.forget(request, older)

    def load(self, request: str, step: int) -> Payload:
        """Return a snapshot; raises `Missing` if it doesn't exist any more."""
        name = _name(request, step)
        value, _ = parse_value(DenoiseState, self._storage.read(name), self._storage.location(name))
        return pack(value)

    def forget(self, request: str, step: int) -> None:
        self._storage.delete(_name(request, step))

    def delete(self, request: str) -> None:
        for step in self._list_steps(request):
            self.forget(request, step)

    def delete_all_of(self, id: str) -> None:
        """Delete all snapshots of an id, whichever request they belong to."""
        for name in self.list_names(id):
            self._storage.delete(name)

    def clean(self) -> None:
        """Remove incomplete files of killed leaders, if storage answers. A complete snapshot takes seconds to write."""
        try:
            self._storage.clean(PARTIAL_S)
        except StorageError as error:
            log.warning("incomplete snapshots can't be deleted: %s", error)

    def list_stems(self) -> list[str]:
        """Return the stems (`build_stem`) of all ids that have snapshots."""
        return sorted({match["id"] for name in self._storage.list() if (match := NAME.fullmatch(name))})

    def list_names(self, id: str) -> list[str]:
        """Return the names in storage of all snapshots of an id."""
        stem = build_stem(id)
        files = self._storage.list(f"{stem}.")
        return [name for name in files if (match := NAME.fullmatch(name)) and match["id"] == stem]

    def _list_steps(self, request: str) -> list[int]:
        return [int(match["step"]) for name in self._storage.list(f"{request}.") if (match := NAME.fullmatch(name))]


def build_stem(id: str) -> str:
    """Return the form of an id in file names: the id itself, or if it is too long, its beginning and a digest."""
    content = id.encode()
    if len(content) <= _MAX_ID_BYTES:
        return id
    start = content[: _MAX_ID_BYTES - 33].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(content).hexdigest()[:32]}"


def delete_snapshots(delete: Callable[[str], None], name: str) -> None:
    """Delete the snapshots of a request that has ended; if storage doesn't answer, they stay as orphans."""
    try:
        delete(name)
    except StorageError as error:
        log.warning("%s: its snapshots can't be deleted: %s", name, error)


class Snapshotter:
    """Copies states out of one slice and saves them while steps go on. `host_key` is a request's key on the hosts."""

    def __init__(
        self,
        slice_: AsyncSlice,
        snapshots: Snapshots,
        store: ObjectStore,
        keep_leader: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Save a slice's states. While one is being written, `keep_leader` keeps the leader from ending."""
        self._slice, self._snapshots, self._store, self._keep_leader = slice_, snapshots, store, keep_leader
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="snapshots")
        self._copying: dict[str, asyncio.Task[None]] = {}  # Copies under way, by the request's key on the hosts.
        self._writing: dict[str, asyncio.Task[None]] = {}  # Writes under way, by the name of the request's snapshots.

    def start(self, host_key: str, request: SliceRequest, *, skip: bool = True) -> None:
        """Copy the state out and save it while steps go on; with `skip`, only if the previous save has ended."""
        before = self._copying.get(host_key)
        if not skip or (before is None and request.snapshots not in self._writing):
            self._copying[host_key] = asyncio.create_task(self._copy(host_key, request, before))

    async def settle(self, host_key: str) -> None:
        """Wait until no state of a request is being copied out. States that were copied may still be written."""
        while (copying := self._copying.get(host_key)) is not None:
            await asyncio.wait([copying])

    async def take(self, host_key: str, request: SliceRequest) -> int | None:
        """Save the state and wait for that; return the number of steps done in it, or None if saving failed."""
        step, ref = await self._slice.save("snapshot", host_key)
        return step if await self._write(request, step, ref) else None

    def keep(self, request: SliceRequest, step: int, ref: Any) -> None:
        """Save a state that was copied out already, in the background."""
        name = request.snapshots
        task = asyncio.create_task(self._write_after(self._writing.get(name), request, step, ref))
        self._writing[name] = task
        task.add_done_callback(lambda done: self._writing.pop(name) if self._writing.get(name) is done else None)

    async def load(self, name: str, step: int) -> Any:
        """Put a snapshot into the object store; raise `StageInterrupted` if it can't be used: a newer one may exist."""
        return await self._in_thread(self._read, name, step)

    async def _copy(self, host_key: str, request: SliceRequest, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            step, ref = await self._slice.save("snapshot", host_key)
            self.keep(request, step, ref)
        except Exception as error:  # Snapshots only save repeated work, so the request goes on without one.
            log.warning("no snapshot of %s: %s", host_key, error)
        finally:
            if self._copying.get(host_key) is asyncio.current_task():
                del self._copying[host_key]

    async def _write_after(self, before: asyncio.Task[None] | None, request: SliceRequest, step: int, ref: Any) -> None:
        with self._keep_leader():
            if before is not None:
                await asyncio.wait([before])
            await self._write(request, step, ref)

    async def _write(self, request: SliceRequest, step: int, ref: Any) -> bool:
        """Save a state, and return whether that succeeded. Failures don't stop the request."""
        try:
            await self._in_thread(self._save, request, step, ref)
            if await _is_finished(request):  # The request's snapshots were deleted while this one was being written.
                await self._in_thread(self._snapshots.forget, request.snapshots, step)
                return False
        except Exception as error:
            log.warning("no snapshot of %s after step %d: %s", request.snapshots, step, error)
            return False
        return True

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await wait_despite_cancellation(
            asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        )

    def _save(self, request: SliceRequest, step: int, ref: Any) -> None:
        state = unpack(self._store.get(ref))
        assert isinstance(state, DenoiseState)
        self._snapshots.save(request.snapshots, step, state)

    def _read(self, name: str, step: int) -> Any:
        try:
            return self._store.put(self._snapshots.load(name, step))
        except Missing:
            raise StageInterrupted(
                f"the snapshot after step {step} of {name} has been replaced by a newer one"
            ) from None
        except StorageError as away:  # The snapshot may still exist, so it isn't deleted.
            raise StageInterrupted(f"a snapshot can't be read now: {away}") from None
        except InvalidInput as damaged:
            with contextlib.suppress(StorageError):  # If this fails, the next reader rejects the snapshot again.
                self._snapshots.forget(name, step)
            raise StageInterrupted(f"a snapshot can't be used and was deleted: {damaged}") from None


async def _is_finished(request: SliceRequest) -> bool:
    """Return whether nobody will resume a request; False if its driver doesn't answer."""
    try:
        async with asyncio.timeout(_FINISHED_S):
            return await request.scope.is_finished()
    except Exception:
        return False


def _name(request: str, step: int) -> str:
    return f"{request}.{step:04d}.safetensors"
