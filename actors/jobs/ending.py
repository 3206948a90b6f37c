"""How a job ends and goes, and when what it has in storage is deleted."""

import dataclasses
from collections.abc import Collection, Sequence

from sqlalchemy import update
from sqlalchemy.orm import Session

from actors.jobs.tables import Delivery, File, Job
from actors.jobs.usage import count
from actors.jobs.values import CANCELLED, DEADLINE, JobSettings, Progress
from wan_tpu.plan import DECODER

# Code and message of a job that was to stop.
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
    warnings: Sequence[str] = (),
) -> Job:
    """Record the end of a job whose row is locked, and return it; what it wrote and isn't a result is to be deleted.

    failure  code and message, of one that wasn't made; one that was to stop (`job.stop_code`) ends as that
    """
    if job.stop_code is not None:
        failure = STOPPED[job.stop_code]
    if failure is None:
        job.status, job.results, job.warnings = "completed", results or {}, list(warnings)
        job.progress = dataclasses.replace(job.progress or Progress(stage=DECODER), percent=100.0, eta_s=None)
    else:
        job.status, (job.error_code, job.error_message) = "failed", failure
    job.lease_token = job.lease_expires_at = None
    job.ended_at, job.expires_at = now, now + settings.ended_s
    count(session, job, now)
    session.execute(update(Delivery).where(Delivery.job_id == job.id).values(due_at=now))
    kept = [*job.results.values(), *job.inputs]
    expire_files(session, job.id, now + (0 if failure is None else settings.abandoned_s), keep=kept)
    return job


def delete_for_owner(session: Session, job: Job, now: float, settings: JobSettings) -> None:
    """Have nobody find a job any more, and its files deleted; one that waits ends before, and its webhook is told."""
    if job.status == "queued":
        end(session, job, now, settings, failure=(CANCELLED, "the job was deleted before it was made"))
    expire_files(session, job.id, now)
    job.deleted_at, job.idempotency_key = now, None


def expire_files(session: Session, job: str, when: float, keep: Collection[str] = ()) -> None:
    """Have the files of a job deleted at `when`, but for those in `keep` and those whose time was set before."""
    session.execute(
        update(File).where(File.job == job, File.name.not_in(keep), File.delete_at.is_(None)).values(delete_at=when)
    )
