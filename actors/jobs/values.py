"""Plain values about jobs: status and error codes, settings, progress, counts. Durations are seconds."""

import dataclasses
import re
import secrets
from typing import Literal

Status = Literal["queued", "in_progress", "completed", "failed"]
# Values of a failed job's `error_code`, which `actors.api.http.job_failures` explains. The store itself records the
# first three, workers the others.
CANCELLED = "cancelled"
DEADLINE = "deadline_exceeded"
LOST = "lost"  # Workers or the pipeline were lost repeatedly.
INVALID = "invalid"  # The request doesn't suit the model, or exceeds the devices' memory.
UNHEALTHY = "unhealthy"  # A stage computed NaN.
BROKEN_VIDEO = "broken_video"  # The result can't be decoded as a video.
INPUT_LOST = "input_lost"  # An input image is no longer in storage.
INTERNAL_ERROR = "internal_error"
PREVIEW = "preview"  # The variant of the picture of an unfinished video.
_ID = re.compile(r"video_[0-9a-f]{48}")


def make_id() -> str:
    """Return an unguessable job id with 192 random bits."""
    return "video_" + secrets.token_hex(24)


def make_storable(text: str) -> str:
    """Return a text that every supported database can store: without NUL (for PostgreSQL) and lone surrogates."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def is_id(text: str) -> bool:
    """Return whether a text that a client sent has the form of a job id."""
    return _ID.fullmatch(text) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
    """How long jobs and files are kept."""

    ended_s: float = 7 * 86400  # How long a job and its results are kept after it has ended.
    # How long a file is kept that probably nobody needs any more: an upload that became no job, or a lost worker's
    # output. It is long, since a worker that hangs may still write the files it has announced.
    abandoned_s: float = 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """What a new job must leave room for: segments that wait, and files. Most jobs have one segment.

    `queue` and `owner` are how many segments for the job's model may wait, in total and of one owner; None for any
    number. Even in a full queue, an owner may have as many waiting as half of the queue divided by the number of owners
    that wait.
    """

    queue: int | None = None
    owner: int | None = None
    stored: int | None = None  # How many bytes the files of the owner's jobs may take; None for any number.

    @property
    def limits(self) -> list[int]:
        return [limit for limit in (self.queue, self.owner) if limit is not None]

    def explain_refusal(self, segments: int, waiting: int, owner_waiting: int, owners: int) -> str | None:
        """Return why a job may not wait, or None if it may.

        Args:
            waiting: Segments that wait, in total.
            owners: How many owners have jobs waiting, this one included.
        """
        counted = "each segment of a video counts as one" + (f"; this video has {segments}" if segments > 1 else "")
        if self.owner is not None and owner_waiting + segments > self.owner:
            return f"this key has {owner_waiting} jobs waiting, and may have {self.owner} ({counted}); try again later"
        queue = self.queue
        if queue is None or waiting + segments <= queue or owner_waiting + segments <= queue // (2 * owners):
            return None
        return f"{waiting} jobs are waiting, and at most {queue} are accepted ({counted}); try again later"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a job has got: its stage, the last finished step, and percent weighted by measured time."""

    stage: str
    step: int = 0
    steps: int = 0
    percent: float = 0.0
    eta_s: float | None = None  # Seconds that were left when this was reported; None if that isn't known yet.
    compiles: bool = False  # Whether its slice is compiling a program for it, so that nothing else happens.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The state of all jobs, for metrics and admission."""

    by_status: dict[Status, int]
    failures: dict[str, int]  # Number of failed jobs by error code.
    oldest_queued_s: float  # How long the oldest queued job has waited; 0 if none waits.
    files_pending_deletion: int  # Files that are due for deletion, now or later.
