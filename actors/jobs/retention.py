"""Files and rows go together: what is to be removed is recorded first, so that a crash leaves nothing behind."""

import logging

from sqlalchemy import delete, select, update

from actors.jobs.database import Database
from actors.jobs.ending import expire_files
from actors.jobs.tables import Delivery, File, Job
from actors.jobs.values import JobSettings
from wan_tpu.storage.base import Storage, StorageError

log = logging.getLogger(__name__)

_BATCH = 100  # jobs or files in one transaction
_RETRY_S = 60.0  # until a file that couldn't be removed is tried again


class Retention:
    """Removes jobs that have expired, and files that nobody needs. Any number of processes may do it at once."""

    def __init__(self, database: Database, storage: Storage, settings: JobSettings = JobSettings()) -> None:  # noqa: B008 (frozen)
        self._database, self._storage, self._settings = database, storage, settings

    def reserve(self, name: str) -> None:
        """Record the name of an upload before it is written; it is removed unless it becomes a job's input in time."""
        with self._database.write() as session:
            delete_at = self._database.now(session) + self._settings.abandoned_s
            session.add(File(name=name, delete_at=delete_at))

    def release(self, name: str) -> bool:
        """Remove an upload that became no job; return False where a job has it, or it is removed later.

        Once it is marked as due, under its row's lock, `JobStore.submit` takes it no more: no job can get it between
        this look and its removal.
        """
        with self._database.write() as session:
            file = session.get(File, name, with_for_update=True)
            if file is None or file.job is not None:
                return False
            file.delete_at = self._database.now(session)
        return self._remove(name)

    def sweep(self) -> tuple[int, int]:
        """Remove what is due; return how many jobs and files that were."""
        expired = sum(iter(self._expire, 0))
        return expired, sum(self._remove(name) for batch in iter(self._due, []) for name in batch)

    def _expire(self) -> int:
        """Remove rows of expired jobs, and expire their files in the same transaction."""
        with self._database.write() as session:
            now = self._database.now(session)
            expired = session.scalars(
                select(Job).where(Job.expires_at <= now).limit(_BATCH).with_for_update(skip_locked=True)
            ).all()
            for job in expired:
                expire_files(session, job.id, now)
                session.execute(delete(Delivery).where(Delivery.job_id == job.id))
                session.delete(job)
        return len(expired)

    def _due(self) -> list[str]:
        with self._database.read() as session:
            now = self._database.now(session)
            query = select(File.name).where(File.delete_at <= now).order_by(File.delete_at).limit(_BATCH)
            return list(session.scalars(query))

    def _remove(self, name: str) -> bool:
        """Remove a file that is due; return False where it is tried again later."""
        try:
            self._storage.delete(name)
        except StorageError as error:
            log.warning("%s; it is tried again in %d s", error, _RETRY_S)
            with self._database.write() as session:
                retry_at = self._database.now(session) + _RETRY_S
                session.execute(update(File).where(File.name == name).values(delete_at=retry_at))
            return False
        with self._database.write() as session:  # after the file: a crash in between removes it once more
            session.execute(delete(File).where(File.name == name))
        return True
