"""Errors of the job store. The HTTP API maps each type to a status code."""

from wan_tpu.errors import InvalidInput, WanTpuError


class JobError(WanTpuError):
    """Base class of the errors that the job store raises on purpose."""


class JobNotFound(JobError):
    """The job doesn't exist, or it belongs to another owner; callers can't tell which."""


class IdempotencyConflict(JobError):
    """The idempotency key was used before, with another body."""


class QueueFull(JobError):
    """The queue holds as many jobs as it may."""


class StoredTooMuch(JobError):
    """The files of the owner's jobs take as much storage as they may."""


class JobUnfinished(JobError):
    """The operation needs a job that has ended."""


class LeaseLost(JobError):
    """The job no longer belongs to this worker: its lease ran out and was taken back, or the job was deleted."""


class StoreUnavailable(JobError):
    """The database can't be reached, or stayed locked for too long; nothing was changed."""


class CommitUncertain(StoreUnavailable):
    """The connection broke during a commit: the change may have been made, and must not be undone."""


class StoreFailed(WanTpuError):
    """The database rejected a statement that should work: a bug in this program, or a damaged database."""


class StoreError(InvalidInput):
    """The database can't be used at all: a wrong address, a missing driver, a schema of a newer version."""
