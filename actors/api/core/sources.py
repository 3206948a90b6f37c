"""The finished videos that requests name by their ids."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from actors.api.core.access import Caller
from actors.api.core.errors import HttpError
from actors.api.untrusted.references import VIDEO
from actors.jobs.errors import JobNotFound
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from wan_tpu.storage.base import Missing, Storage

T = TypeVar("T")
FINAL_FRAME = "final_frame"  # The variant that a video is continued from.


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file of another job in storage, which a new job shares as an input."""

    name: str


class Sources:
    """The videos of a service. Its methods wait for database and storage, so call them in threads."""

    def __init__(self, store: JobStore, storage: Storage) -> None:
        self._store, self._storage = store, storage

    def find(self, video: str, caller: Caller) -> Job:
        """Return a completed job of the caller's; raises `HttpError`."""
        try:
            job = self._store.get(video, caller.sees)
        except JobNotFound as error:
            raise HttpError(400, str(error), code="video_not_found", param=VIDEO) from None
        if job.status != "completed":
            instead = "send another" if job.has_ended else "ask again when it has completed"
            message = f"{job.id} is {job.status}, and only completed videos can be used; {instead}"
            raise HttpError(400, message, code="video_not_ready", param=VIDEO)
        return job

    def measure(self, job: Job, *variants: str) -> int:
        """Return the bytes of results of a job; raises `HttpError` where it hasn't one."""
        return sum(self._find_results(self._storage.size, job, variants))

    def locate(self, job: Job, *variants: str) -> list[StoredFile]:
        """Return results of a job, to be shared; raises `HttpError` where it hasn't one."""
        self._find_results(self._storage.size, job, variants)
        return [StoredFile(job.results[variant]) for variant in variants]

    def read(self, job: Job, *variants: str) -> list[bytes]:
        """Return results of a job; raises `HttpError` where it hasn't one."""
        return self._find_results(self._storage.read, job, variants)

    def _find_results(self, look: Callable[[str], T], job: Job, variants: Sequence[str]) -> list[T]:
        if missing := [variant for variant in variants if variant not in job.results]:
            message = (
                f"{job.id} has no {missing[0]}: it was made by an earlier version, or that picture couldn't be made; "
                "send its file as video instead"
            )
            raise HttpError(400, message, code="video_not_ready", param=VIDEO)
        try:
            return [look(job.results[variant]) for variant in variants]
        except Missing:
            message = f"{job.id} no longer exists: it was deleted, or has expired"
            raise HttpError(400, message, code="video_not_found", param=VIDEO) from None
