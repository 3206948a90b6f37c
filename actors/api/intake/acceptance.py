"""How a job is accepted: its images are stored first, then the job is committed, and nothing is undone on a guess."""

import contextlib
import time
from collections.abc import Sequence

from actors.api.http.error_answers import HttpError
from actors.jobs.errors import CommitUncertain, StoreFailed, StoreUnavailable
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from actors.jobs.values import Room
from wan_tpu.storage.base import Storage

_LOOK_S = 5.0  # for a job whose commit's answer was lost, before its client is told that nobody knows
_AGAIN_S = 0.25  # between two looks
_REPEAT_S = 5  # after which its client may ask again


class MaybeAccepted(HttpError):
    """The database went away as a job was committed, and doesn't say whether it has it."""

    def __init__(self) -> None:
        message = (
            "the database went away while this video was accepted, so it may have been: GET /v1/videos lists it then. "
            "Repeat the request with the same Idempotency-Key, which makes no second one"
        )
        super().__init__(503, message, code="unavailable", after_s=_REPEAT_S)


class Acceptance:
    """Accepts jobs. Its methods wait for the storage and the database: call them in threads."""

    def __init__(self, store: JobStore, storage: Storage, retention: Retention) -> None:
        self._store, self._storage, self._retention = store, storage, retention

    def accept(
        self, job: Job, pngs: Sequence[bytes], *, webhook_url: str | None = None, room: Room
    ) -> tuple[Job, bool]:
        """Accept a job and its input images; return it, and whether it is new, as `JobStore.submit` does.

        Raises what that raises, `StorageError`, and `MaybeAccepted`; after any other error nothing was accepted.
        """
        try:
            for name, png in zip(job.inputs, pngs, strict=True):
                self._retention.reserve(name)
                self._storage.write(name, png)
            accepted, new = self._store.submit(job, webhook_url=webhook_url, room=room)
        except CommitUncertain:
            if (found := self._find_committed(job)) is not None:
                return found, True
            self._release(job)
            raise
        except BaseException:
            self._release(job)
            raise
        if not new:
            self._release(job)
        return accepted, new

    def _find_committed(self, job: Job) -> Job | None:
        """Return the job if the lost commit was made, None if it wasn't; raises `MaybeAccepted` if nobody says."""
        give_up = time.monotonic() + _LOOK_S
        while True:
            try:
                return self._store.find_committed(job.id)
            except (StoreUnavailable, StoreFailed):
                if time.monotonic() > give_up:
                    raise MaybeAccepted from None
                time.sleep(_AGAIN_S)

    def _release(self, job: Job) -> None:
        for name in job.inputs:
            with contextlib.suppress(StoreUnavailable, StoreFailed):  # it is removed in an hour
                self._retention.release(name)
