"""Remove files together with rows. Removals are recorded first, so that a crash leaves nothing behind."""

import logging

from sqlalchemy import ColumnElement, delete, select, update

from actors.jobs.admission import QUEUED
from actors.jobs.database import Database
from actors.jobs.ending import expire_files
from actors.jobs.sharing import expire_unshared
from actors.jobs.tables import Delivery, File, Job, StoredFragment
from actors.jobs.values import JobSettings
from wan_tpu.storage.base import Storage, StorageError

log = logging.getLogger(__name__)

_BATCH = 100  # Jobs or files handled in one transaction.
_RETRY_S = 60.0  # Pause before another attempt at a file that couldn't be removed.
# The `delete_at` of a file that is being removed: long ago, so it is due by every clock, and no job takes it.
_REMOVING = 1.0


_WAITS = Job.status == QUEUED


class Retention:
    """Removes expired jobs and files that nobody needs. Any number of processes may do so at once."""

    def __init__(self, database: Database, storage: Storage, settings: JobSettings = JobSettings()) -> None:  # noqa: B008 (frozen)
        self._database, self._storage, self._settings = database, storage, settings

    def reserve(self, name: str, owner: str, size: int) -> None:
        """Record an upload's name before it is written. The file is removed unless it becomes a job's input in time.

        Args:
            owner: The id of the key that sends it.
            size: Its bytes, which count as stored from now on.
        """
        with self._database.write() as session:
            delete_at = self._database.now(session) + self._settings.abandoned_s
            session.add(File(name=name, owner=owner, size=size, delete_at=delete_at))

    def release(self, name: str) -> bool:
        """Remove an upload that no job uses; return False if a job uses it, or if it can only be removed later.

        The file is marked as due under its row's lock. From then on `JobStore.submit` refuses it, so that no job can
        acquire it between this check and its removal.
        """
        with self._database.write() as session:
            file = session.get(File, name, with_for_update=True)
            if file is None or file.job is not None:
                return False
            file.delete_at = self._database.now(session)
        return self._remove(name)

    def sweep(self) -> tuple[int, int]:
        """Remove what is due; return the numbers of jobs and of files removed."""
        count = sum(iter(self._expire, 0))
        self._keep_needed()
        expire_unshared(self._database)
        return count, sum(self._remove(name) for batch in iter(self._list_due, []) for name in batch)

    def _expire(self) -> int:
        """Remove rows of expired jobs, and expire their files in the same transaction."""
        with self._database.write() as session:
            now = self._database.now(session)
            jobs = session.scalars(
                select(Job).where(Job.expires_at <= now).limit(_BATCH).with_for_update(skip_locked=True)
            ).all()
            for job in jobs:
                expire_files(session, job.id, now)
                session.execute(delete(Delivery).where(Delivery.job_id == job.id))
                session.delete(job)
        return len(jobs)

    def _keep_needed(self) -> None:
        """Keep files that a waiting job needs, which a worker of an earlier version that doesn't know them lets expire.

        Claims keep them as well, but the job may wait for longer than they stay.
        """
        with self._database.read() as session:
            is_pending = File.delete_at > self._database.now(session)
            pairs = session.execute(select(Job, File.name).join(File, File.job == Job.id).where(_WAITS, is_pending))
            expiring = {job.id for job, name in pairs if name in job.needed_files}
        for key in expiring:
            with self._database.write() as session:
                job = session.scalar(select(Job).where(_WAITS, Job.id == key).with_for_update(skip_locked=True))
                if job is not None:
                    needed = (File.job == job.id) & File.name.in_(job.needed_files)
                    session.execute(update(File).where(needed, File.delete_at.is_not(None)).values(delete_at=None))

    def _list_due(self) -> list[str]:
        with self._database.read() as session:
            now = self._database.now(session)
            query = select(File.name).where(File.delete_at <= now).order_by(File.delete_at).limit(_BATCH)
            return list(session.scalars(query))

    def _remove(self, name: str) -> bool:
        """Remove a file if it is still due; return False if it isn't any more, or if another attempt is scheduled."""
        with self._database.write() as session:
            is_due = (File.name == name) & (File.delete_at <= self._database.now(session))
            if not session.execute(update(File).where(is_due).values(delete_at=_REMOVING).returning(File.name)).all():
                return False
        try:
            self._storage.delete(name)
        except StorageError as error:
            log.warning("%s; trying again in %d s", error, _RETRY_S)
            with self._database.write() as session:
                retry_at = self._database.now(session) + _RETRY_S
                session.execute(update(File).where(_is_removing(name)).values(delete_at=retry_at))
            return False
        with self._database.write() as session:  # Last: after a crash in between, the file is removed once more.
            if session.execute(delete(File).where(_is_removing(name)).returning(File.name)).all():
                session.execute(delete(StoredFragment).where(StoredFragment.name == name))
        return True


def _is_removing(name: str) -> ColumnElement[bool]:
    return (File.name == name) & (File.delete_at == _REMOVING)
