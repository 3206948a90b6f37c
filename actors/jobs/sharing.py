"""Files in storage that several jobs need: a finished video, and the inputs of the jobs that begin with it.

A shared file belongs to no job (`File.job` is `SHARED`), so no end, deletion or expiry of a job schedules its removal,
not even one by an earlier version. It is scheduled once every job that has a share in it is gone.
"""

from collections.abc import Sequence

from sqlalchemy import delete, exists, select, update
from sqlalchemy.orm import Session

from actors.jobs.database import Database
from actors.jobs.errors import JobError
from actors.jobs.tables import File, FileShare, Job

SHARED = "shared"


class FileGone(JobError):
    """A file that a job should share is gone, or about to be removed."""


_IS_ALIVE = exists().where(Job.id == FileShare.job, Job.deleted_at.is_(None))


def share(session: Session, name: str, job: Job) -> None:
    """Give a new job a share in a file of another job; raises `FileGone`.

    The file's row is locked until the transaction ends, so that nothing schedules its removal meanwhile.
    """
    file = session.get(File, name, with_for_update=True)
    if file is None or file.job is None or file.delete_at is not None:
        raise FileGone(f"the file {name} is no longer stored")
    if file.job != SHARED:
        session.add(FileShare(name=name, job=file.job))
        file.job = SHARED
    session.add(FileShare(name=name, job=job.id))


def withdraw(session: Session, job: str, names: Sequence[str]) -> None:
    """End a job's share in files before its row is deleted; `expire_unshared` finds that nobody has the share."""
    own = (FileShare.job == job) & FileShare.name.in_(names)
    session.execute(update(FileShare).where(own).values(job=f"-{job}"))


def expire_unshared(database: Database) -> int:
    """Schedule the removal of shared files that no job needs any more; return their number."""
    with database.read() as session:
        names = session.scalars(select(FileShare.name).where(~_IS_ALIVE).distinct()).all()
    for name in names:
        with database.write() as session:
            file = session.get(File, name, with_for_update=True)
            session.execute(delete(FileShare).where(FileShare.name == name, ~_IS_ALIVE))
            if file is not None and not session.scalar(select(exists().where(FileShare.name == name))):
                file.delete_at = database.now(session)
    return len(names)
