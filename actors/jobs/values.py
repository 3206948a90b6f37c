"""What a job is, as values. Times are Unix seconds by the database's clock, durations seconds."""

import dataclasses
import hashlib
import json
import re
import secrets
from typing import Any, Literal

Status = Literal["queued", "in_progress", "completed", "failed"]
STATUSES: tuple[Status, ...] = ("queued", "in_progress", "completed", "failed")
FINISHED: tuple[Status, ...] = ("completed", "failed")
# Codes of failures that the store itself records; workers add theirs ("invalid", "unhealthy", ...).
CANCELLED = "cancelled"
DEADLINE = "deadline_exceeded"
LOST = "lost"
_ID = re.compile(r"video_[0-9a-f]{48}")


def new_id() -> str:
    """Return an unguessable job id: 192 random bits."""
    return "video_" + secrets.token_hex(24)


def is_id(text: str) -> bool:
    """Whether a text that a client sent has the form of a job id."""
    return _ID.fullmatch(text) is not None


def digest(body: Any) -> str:
    """Return the SHA-256 of a request's JSON, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """A job to be accepted.

    owner            id of the API key it belongs to; "" where there are no keys
    request          the request as it was accepted, plain JSON
    input_image      name of the input image in storage, recorded with `Files.reserve` before it was written
    priority         higher ones are claimed first; owners of equal priority take turns
    deadline         a job that hasn't ended by then fails with code "deadline_exceeded"
    idempotency_key  the same key and body of the same owner is the same job
    body_digest      of what the client sent, for the comparison; of `request` when left out
    webhook_url      told when the job has ended
    """

    owner: str
    request: dict[str, Any]
    input_image: str | None = None
    priority: int = 0
    deadline: float | None = None
    idempotency_key: str | None = None
    body_digest: str | None = None
    webhook_url: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a job is: the stage, the last finished step of how many, and percent weighted by measured time.

    eta_s  seconds that were left when this was told; None where nothing is known yet
    """

    stage: str
    step: int = 0
    steps: int = 0
    percent: float = 0.0
    eta_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A row of the table, as it was when it was read.

    sequence          position in order of acceptance; grows
    attempts          how often it was claimed
    losses            how often its worker was lost
    stop_code         set when a running job is to stop: why ("cancelled", "deadline_exceeded")
    results           what was made: variant ("video", "thumbnail", ...) -> name in storage
    stage_seconds     measured, summed over attempts, as last told by a worker
    expires_at        when the job and its files are removed
    """

    sequence: int
    id: str
    owner: str
    status: Status
    request: dict[str, Any]
    input_image: str | None
    priority: int
    turn: int
    deadline: float | None
    idempotency_key: str | None
    body_digest: str
    error_code: str | None
    error_message: str | None
    stop_code: str | None
    progress: Progress | None
    attempts: int
    losses: int
    worker: str | None
    lease_expires_at: float | None
    results: dict[str, str]
    stage_seconds: dict[str, float]
    chip_seconds: float
    created_at: float
    started_at: float | None
    ended_at: float | None
    expires_at: float | None

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in FINISHED

    @property
    def cost(self) -> "Cost":
        """What it has used so far."""
        return Cost(stage_seconds=self.stage_seconds, chip_seconds=self.chip_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """Some jobs of a list, in order; `more` when others follow the last."""

    jobs: tuple[Job, ...]
    more: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """The right to work on a job, until `expires_at` or longer if renewed. `token` is new with every claim."""

    job: Job
    worker: str
    token: str
    expires_at: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a job has used so far, over all attempts: seconds by stage, and chip-seconds."""

    stage_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    chip_seconds: float = 0.0

    def plus(self, stage: str, seconds: float, chips: int) -> "Cost":
        """Return this and `seconds` more of a stage on `chips` chips."""
        used = self.stage_seconds | {stage: self.stage_seconds.get(stage, 0.0) + seconds}
        return Cost(stage_seconds=used, chip_seconds=self.chip_seconds + seconds * chips)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The state of all jobs, for metrics and admission.

    by_status         status -> jobs
    failures          error code -> jobs that failed with it
    oldest_queued_s   how long the oldest waiting job has waited; 0 when none waits
    doomed_files      files that wait to be removed
    """

    by_status: dict[Status, int]
    failures: dict[str, int]
    oldest_queued_s: float
    doomed_files: int
