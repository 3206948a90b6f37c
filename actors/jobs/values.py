"""What jobs have and what is told of them, as values. Durations are seconds."""

import dataclasses
import re
import secrets
from typing import Literal

Status = Literal["queued", "in_progress", "completed", "failed"]
# Why a job can have failed, by its `error_code`. The store itself records the first three, workers the others.
CANCELLED = "cancelled"
DEADLINE = "deadline_exceeded"
LOST = "lost"  # Workers or the pipeline went away again and again.
INVALID = "invalid"  # The request doesn't fit the model, or the devices' memory.
UNHEALTHY = "unhealthy"  # A stage computed NaN.
BROKEN_VIDEO = "broken_video"  # What was made can't be read as a video.
INPUT_LOST = "input_lost"  # Its image isn't in storage any more.
INTERNAL_ERROR = "internal_error"
CODES = (CANCELLED, DEADLINE, LOST, INVALID, UNHEALTHY, BROKEN_VIDEO, INPUT_LOST, INTERNAL_ERROR)
_ID = re.compile(r"video_[0-9a-f]{48}")


def new_id() -> str:
    """Return an unguessable job id: 192 random bits."""
    return "video_" + secrets.token_hex(24)


def storable(text: str) -> str:
    """Return a text that every supported database can hold: PostgreSQL takes no NUL, none takes lone surrogates."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def is_id(text: str) -> bool:
    """Whether a text that a client sent has the form of a job id."""
    return _ID.fullmatch(text) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
    """How often workers are to be heard of, and how long things are kept; times in seconds.

    lease_s      a claim ends this long after the last heartbeat: several of them, longer than the database may pause
    losses       a job that has lost this many workers fails: it may be what kills them
    ended_s      how long a job and its results are kept after it has ended
    abandoned_s  and a file that nobody may need any more: an upload that became no job, or what a lost worker was
                 writing. Long, since a worker that hangs may still write what it has announced.
    """

    lease_s: float = 30.0
    losses: int = 10
    ended_s: float = 7 * 86400
    abandoned_s: float = 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """How many jobs may wait: in all, and of one owner; None for any number.

    Where all are there, an owner that has few of them may add to them still: half of what each would have if all those
    who wait had equally many.
    """

    queue: int | None = None
    owner: int | None = None

    def refusal(self, waiting: int, own: int, owners: int) -> str | None:
        """Return why one more may not wait, None if it may; owners: of all that wait, this one included."""
        if self.owner is not None and own >= self.owner:
            return f"{own} jobs of this key wait, which is all that it may have; try again later"
        if self.queue is None or waiting < self.queue or own < self.queue // (2 * owners):
            return None
        return f"{waiting} jobs wait, which is all that are taken; try again later"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a job is: the stage, the last finished step of how many, and percent weighted by measured time.

    eta_s  seconds that were left when this was reported; None where nothing is known yet
    """

    stage: str
    step: int = 0
    steps: int = 0
    percent: float = 0.0
    eta_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The state of all jobs, for metrics and admission.

    by_status         status -> jobs
    failures          error code -> jobs that failed with it
    oldest_queued_s   how long the oldest waiting job has waited; 0 when none waits
    files_pending_deletion  files that are to be deleted, now or later
    """

    by_status: dict[Status, int]
    failures: dict[str, int]
    oldest_queued_s: float
    files_pending_deletion: int
