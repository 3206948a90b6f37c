"""Files and rows go together: what is to be removed is recorded first, so that a crash leaves nothing behind."""

import logging

from sqlalchemy import delete, insert, select, update

from actors.jobs.database import Database
from actors.jobs.rows import Keeping, doom
from actors.jobs.tables import deliveries, files, jobs
from actors.storage import Storage, StorageError

log = logging.getLogger(__name__)

_BATCH = 100  # jobs or files in one transaction
_RETRY_S = 60.0  # until a file that couldn't be removed is tried again


class Retention:
    """Removes jobs that have expired, and files that nobody needs. Any number of processes may do it at once."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        keeping: Keeping = Keeping(),  # noqa: B008 (frozen)
    ) -> None:
        self._database = database
        self._storage = storage
        self._keeping = keeping

    def reserve(self, name: str) -> None:
        """Record the name of an upload before it is written; it is removed unless it becomes a job's input in time."""
        with self._database.write() as connection:
            doomed_at = self._database.now(connection) + self._keeping.abandoned_s
            connection.execute(insert(files).values(name=name, doomed_at=doomed_at))

    def sweep(self) -> tuple[int, int]:
        """Remove what is due; return how many jobs and files that were."""
        expired = 0
        while count := self._expire():
            expired += count
        removed = 0
        while batch := self._due():
            removed += sum(self._remove(name) for name in batch)
        return expired, removed

    def _expire(self) -> int:
        """Remove rows of expired jobs, and doom their files in the same transaction."""
        with self._database.write() as connection:
            now = self._database.now(connection)
            expired = connection.scalars(
                select(jobs.c.id).where(jobs.c.expires_at <= now).limit(_BATCH).with_for_update(skip_locked=True)
            ).all()
            for job in expired:
                doom(connection, job, now)
            connection.execute(delete(deliveries).where(deliveries.c.job.in_(expired)))
            connection.execute(delete(jobs).where(jobs.c.id.in_(expired)))
        return len(expired)

    def _due(self) -> list[str]:
        with self._database.read() as connection:
            now = self._database.now(connection)
            query = select(files.c.name).where(files.c.doomed_at <= now).order_by(files.c.doomed_at).limit(_BATCH)
            return list(connection.scalars(query))

    def _remove(self, name: str) -> bool:
        try:
            self._storage.delete(name)
        except StorageError as error:
            log.warning("%s; it is tried again in %d s", error, _RETRY_S)
            with self._database.write() as connection:
                retry_at = self._database.now(connection) + _RETRY_S
                connection.execute(update(files).where(files.c.name == name).values(doomed_at=retry_at))
            return False
        with self._database.write() as connection:  # after the file: a crash in between removes it once more
            connection.execute(delete(files).where(files.c.name == name))
        return True
