"""What can go wrong with a job. The HTTP API turns each into a status code by its type."""

from wan_tpu.errors import InvalidInput, WanTpuError


class JobError(WanTpuError):
    """Base of what the job store raises on purpose."""


class JobNotFound(JobError):
    """There is no such job, or it belongs to another owner: a caller can't tell which."""


class IdempotencyConflict(JobError):
    """The same idempotency key came with another body."""


class QueueFull(JobError):
    """As many jobs wait as the queue takes."""


class JobUnfinished(JobError):
    """What was asked for needs a job that has ended."""


class LeaseLost(JobError):
    """The job isn't this worker's any more: its lease ran out and was taken back, or the job was deleted."""


class StoreUnavailable(JobError):
    """The database can't be reached, or is locked for too long; nothing was changed."""


class CommitUncertain(StoreUnavailable):
    """The connection broke while a change was being committed: it may have been made, and is not to be undone."""


class StoreFailed(WanTpuError):
    """The database refused a statement that it shouldn't: a defect of this program, or a damaged database."""


class StoreError(InvalidInput):
    """The database can't be used at all: a wrong address, a missing driver, a schema of a newer version."""
