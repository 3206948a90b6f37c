"""End and delete jobs, and schedule the deletion of their files."""

import dataclasses
from collections.abc import Collection

from sqlalchemy import update
from sqlalchemy.orm import Session

from actors.jobs.sharing import withdraw
from actors.jobs.stored_request import read_redo
from actors.jobs.tables import Delivery, File, Job
from actors.jobs.usage import count
from actors.jobs.values import CANCELLED, DEADLINE, PREVIEW, JobSettings, Progress
from wan_tpu.plan import DECODER

# Error code and message by the reason for which a job was stopped.
STOPPED = {
    CANCELLED: (CANCELLED, "the job was cancelled"),
    DEADLINE: (DEADLINE, "the job's deadline passed before it was done"),
}


def end(
    session: Session,
    job: Job,
    now: float,
    settings: JobSettings,
    *,
    failure: tuple[str, str] | None = None,
    results: dict[str, str] | None = None,
) -> Job:
    """Record the end of a job and return it. Files that it wrote and that aren't results are scheduled for deletion.

    They stay for a while: clients may be slow to read the last fragments, and a worker that hangs may still write.

    Args:
        session: A transaction that has locked the job's row.
        now: Unix seconds by the database's clock.
        settings: How long the job and its files are kept.
        failure: Error code and message of a job that failed. A job with a `stop_code` always fails with that code.
        results: Names of its results in storage, by variant.
    """
    if job.stop_code is not None:
        failure = STOPPED[job.stop_code]
    if failure is None:
        job.status, job.results = "completed", results or {}
        job.progress = dataclasses.replace(job.progress or Progress(stage=DECODER), percent=100.0, eta_s=None)
    else:
        job.status, (job.error_code, job.error_message) = "failed", failure
        job.results = {variant: name for variant, name in job.results.items() if variant == PREVIEW}
        if (redo := read_redo(job.request)) is not None:
            withdraw(session, job.id, redo.files)
    job.lease_token = job.lease_expires_at = None
    job.ended_at, job.expires_at = now, now + settings.ended_s
    count(session, job, now)
    session.execute(update(Delivery).where(Delivery.job_id == job.id).values(due_at=now))
    expire_files(session, job.id, now + settings.abandoned_s, keep=[*job.results.values(), *job.inputs])
    return job


def delete_for_owner(session: Session, job: Job, now: float, settings: JobSettings) -> None:
    """Hide a job and schedule the deletion of its files. A queued job is cancelled first, and its webhook called."""
    if job.status == "queued":
        end(session, job, now, settings, failure=(CANCELLED, "the job was deleted before it was made"))
    expire_files(session, job.id, now)
    if job.status == "completed":  # Its last attempt writes nothing more, except for files that have no attempt now.
        latest = (File.job == job.id) & (File.attempt == job.attempts)
        session.execute(update(File).where(latest).values(delete_at=now))
    job.deleted_at, job.idempotency_key = now, None


def expire_files(session: Session, job: str, delete_at: float, keep: Collection[str] = ()) -> None:
    """Schedule the deletion of a job's files at `delete_at`, except those in `keep` and those already scheduled."""
    session.execute(
        update(File)
        .where(File.job == job, File.name.not_in(keep), File.delete_at.is_(None))
        .values(delete_at=delete_at)
    )
