"""Accept jobs: store their inputs first, then commit the job, and undo nothing while the outcome is uncertain."""

import contextlib
import time
from collections.abc import Iterable, Mapping

from actors.api.core.errors import HttpError
from actors.jobs.errors import CommitUncertain, StoreFailed, StoreUnavailable
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from actors.jobs.values import Room
from wan_tpu.storage.base import Storage

_LOOK_S = 5.0  # How long to look for a job whose commit got no answer, before the client gets an error.
_AGAIN_S = 0.25  # Between two looks.
_REPEAT_S = 5  # When the client may repeat its request.


class MaybeAccepted(HttpError):
    """The database went away while a job was committed, and whether it has the job is unknown."""

    def __init__(self) -> None:
        message = (
            "the database became unreachable while this video was being accepted. If it was accepted, GET "
            "/v1/videos lists it. Repeating the request with the same Idempotency-Key never creates a second video"
        )
        super().__init__(503, message, code="unavailable", after_s=_REPEAT_S)


class Acceptance:
    """Accepts jobs. Its methods wait for storage and database, so call them in threads."""

    def __init__(self, store: JobStore, storage: Storage, retention: Retention) -> None:
        self._store, self._storage, self._retention = store, storage, retention

    def accept(
        self, job: Job, contents: Mapping[str, bytes], *, webhook_url: str | None = None, room: Room
    ) -> tuple[Job, bool]:
        """Store a job's own inputs, and accept the job; return what `JobStore.submit` returns.

        It also raises what that raises. After any error but `MaybeAccepted`, nothing was accepted.

        Args:
            contents: Its own inputs, by their names. It shares its other inputs with other jobs.

        Raises:
            StorageError: An input can't be stored.
            MaybeAccepted: Whether the job was accepted is unknown.
        """
        try:
            for name, content in contents.items():
                self._retention.reserve(name, job.owner, len(content))
                self._storage.write(name, content)
            shared = set(job.inputs) - contents.keys()
            accepted, new = self._store.submit(job, shared=shared, webhook_url=webhook_url, room=room)
        except CommitUncertain:
            if (existing := self._find_committed(job)) is not None:
                return existing, True
            self._release(contents)
            raise
        except BaseException:
            self._release(contents)
            raise
        if not new:
            self._release(contents)
        return accepted, new

    def _find_committed(self, job: Job) -> Job | None:
        """Return the job if the commit succeeded, None if it failed; raises `MaybeAccepted` if that stays unknown."""
        give_up = time.monotonic() + _LOOK_S
        while True:
            try:
                return self._store.find_committed(job.id)
            except (StoreUnavailable, StoreFailed):
                if time.monotonic() > give_up:
                    raise MaybeAccepted from None
                time.sleep(_AGAIN_S)

    def _release(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(StoreUnavailable, StoreFailed):  # Retention removes it in an hour.
                self._retention.release(name)
