"""States that a slice's leader copies out while steps go on, and keeps as snapshots."""

import asyncio
import logging

import ray

from actors.calls import Calls
from actors.errors import StageLost
from actors.snapshots import Missing, Snapshots
from wan_tpu.errors import InvalidInput

log = logging.getLogger(__name__)


class Keeping:
    """Takes snapshots of what a slice holds. `held`: its name there; `kept`: that of the request's snapshots."""

    def __init__(self, calls: Calls, snapshots: Snapshots) -> None:
        self._calls, self._snapshots = calls, snapshots
        self._saving: dict[str, asyncio.Task[None]] = {}

    def beside(self, held: str, kept: str) -> None:
        """Copy the state out and save it while steps go on; skipped while the one before is still being saved."""
        if held not in self._saving or self._saving[held].done():
            self._saving[held] = asyncio.create_task(self._save(held, kept))

    async def settled(self, held: str) -> None:
        """Wait until no copy of it is under way."""
        if held in self._saving:
            await asyncio.wait([self._saving.pop(held)])

    async def now(self, held: str, kept: str) -> int:
        """Save the state before this returns; return after which step it was taken."""
        step, ref = await self._calls.side_payload("snapshot", held)
        await self.keep(kept, step, ref)
        return step

    async def keep(self, kept: str, step: int, ref: ray.ObjectRef) -> None:
        """Save a state that was copied out already."""
        await self._calls.run(self._write, kept, step, ref)

    async def load(self, kept: str, step: int) -> ray.ObjectRef:
        """Put a snapshot into the object store; raises `StageLost` when it can't be used: a newer one may be there."""
        return await self._calls.run(self._read, kept, step)

    async def _save(self, held: str, kept: str) -> None:
        try:
            await self.now(held, kept)
        except Exception:  # a snapshot is insurance: the request goes on without
            log.exception("no snapshot of %s", held)

    def _write(self, kept: str, step: int, ref: ray.ObjectRef) -> None:
        from actors.payloads import unpack

        self._snapshots.save(kept, step, unpack(ray.get(ref)))  # type: ignore[arg-type]

    def _read(self, kept: str, step: int) -> ray.ObjectRef:
        try:
            return ray.put(self._snapshots.load(kept, step))
        except Missing:
            raise StageLost(f"the snapshot after step {step} of {kept} has been replaced by a newer one") from None
        except InvalidInput as damaged:
            self._snapshots.forget(kept, step)
            raise StageLost(f"a snapshot can't be used and was deleted: {damaged}") from None
