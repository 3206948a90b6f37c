"""The tables, each as the class of its rows; a change here needs a migration, which brings older databases to it.

A row that was read stays a plain value after its transaction. Times are Unix seconds by the database's clock.
"""

import dataclasses
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Dialect, Float, Index, Integer, String, Text, TypeDecorator, text
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    foreign,
    mapped_column,
    query_expression,
    relationship,
)

from actors.jobs.stored_request import from_stored, to_stored
from actors.jobs.values import Progress, Status, new_id


class Table(MappedAsDataclass, DeclarativeBase):
    """What the tables have in common."""

    type_annotation_map: ClassVar = {float: Float}  # else Double


class _ProgressColumn(TypeDecorator[Progress]):
    impl = JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Progress | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else dataclasses.asdict(value)

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> Progress | None:
        return None if value is None else Progress(**value)


class _RequestColumn(TypeDecorator[dict[str, Any]]):
    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: dict[str, Any] | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else to_stored(value)

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else from_stored(value)


class Job(Table, kw_only=True):
    """A job. To be submitted, it has an owner and a request, and what else its owner decides; the queue sets the rest.

    sequence          position in order of acceptance; grows
    owner             id of the API key it belongs to; "" where there are no keys
    request           the request as it was accepted, plain JSON: what a client wrote, which no query looks into. It has
                      the fields of a resolved `wan_tpu.request.GenerationRequest` but its images, adapters by their
                      names, and `stored_request.BESIDE`
    model             name of the model that it was accepted for; None where a program before schema 0004 accepted it
    input_image       name of the first frame in storage, recorded with `Retention.reserve` before it was written
    input_last_image  of the last frame, likewise
    priority          higher ones are claimed first; round-robin over owners of equal priority
    round             of that round-robin: owners of equal priority have one job claimed in each
    deadline          a job that hasn't ended by then fails with code "deadline_exceeded"
    idempotency_key   the same key and body of the same owner is the same job
    body_digest       of what the client sent, for the comparison
    attempts          how often it was claimed
    losses            how often its worker was lost
    stop_code         set when a running job is to stop: why ("cancelled", "deadline_exceeded")
    results           what was made: variant ("video", "thumbnail", ...) -> name in storage
    warnings          what its owner should know of the video, such as that a prompt was cut
    stage_seconds     measured, summed over attempts, as last reported by a worker
    dollars           what its chip-seconds cost, where prices are known
    remixed_from      id of the job whose request this one repeats, with another prompt
    expires_at        when the job and its files are removed
    deleted_at        when its owner has deleted it: nobody finds it any more, but the lists that began at it go on
    position          jobs claimed before it if none is added; None when it doesn't wait, or that wasn't asked for
    """

    __tablename__ = "jobs"

    sequence: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"),  # SQLite counts up by itself in a column of exactly this type
        primary_key=True,
        autoincrement=True,
        default=None,
    )
    id: Mapped[str] = mapped_column(String(64), unique=True, default_factory=new_id)
    owner: Mapped[str] = mapped_column(String(64))
    status: Mapped[Status] = mapped_column(String(16), default="queued")
    request: Mapped[dict[str, Any]] = mapped_column(_RequestColumn)
    model: Mapped[str | None] = mapped_column(String(200), default=None)
    input_image: Mapped[str | None] = mapped_column(Text, default=None)
    input_last_image: Mapped[str | None] = mapped_column(Text, default=None)
    priority: Mapped[int] = mapped_column(default=0)
    round: Mapped[int] = mapped_column(BigInteger, default=0)
    deadline: Mapped[float | None] = mapped_column(default=None)
    idempotency_key: Mapped[str | None] = mapped_column(String(255), default=None)
    body_digest: Mapped[str] = mapped_column(String(64), default="")
    error_code: Mapped[str | None] = mapped_column(String(64), default=None)
    error_message: Mapped[str | None] = mapped_column(Text, default=None)
    stop_code: Mapped[str | None] = mapped_column(String(64), default=None)
    progress: Mapped[Progress | None] = mapped_column(_ProgressColumn, default=None)
    attempts: Mapped[int] = mapped_column(default=0)
    losses: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None] = mapped_column(String(255), default=None)
    lease_token: Mapped[str | None] = mapped_column(String(64), default=None, repr=False)
    lease_expires_at: Mapped[float | None] = mapped_column(default=None)
    results: Mapped[dict[str, str]] = mapped_column(JSON, default_factory=dict)
    warnings: Mapped[list[str]] = mapped_column(JSON, default_factory=list)
    stage_seconds: Mapped[dict[str, float]] = mapped_column(JSON, default_factory=dict)
    chip_seconds: Mapped[float] = mapped_column(default=0.0)
    dollars: Mapped[float] = mapped_column(default=0.0)
    remixed_from: Mapped[str | None] = mapped_column(String(64), default=None)
    created_at: Mapped[float] = mapped_column(default=0.0)
    started_at: Mapped[float | None] = mapped_column(default=None)
    ended_at: Mapped[float | None] = mapped_column(default=None)
    expires_at: Mapped[float | None] = mapped_column(default=None)
    deleted_at: Mapped[float | None] = mapped_column(default=None)
    position: Mapped[int | None] = query_expression()

    # A number is never used again, so that pages stay in order after deletions.
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012 (SQLAlchemy's own)

    @property
    def inputs(self) -> list[str]:
        """Names of its input images in storage."""
        return [name for name in (self.input_image, self.input_last_image) if name is not None]

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ("completed", "failed")

    def spend(self, stage: str, seconds: float, chips: int, dollars_an_hour: float = 0.0) -> None:
        """Add what a stage has computed on so many chips, each of which costs so much."""
        self.stage_seconds = self.stage_seconds | {stage: self.stage_seconds.get(stage, 0.0) + seconds}
        self.chip_seconds += seconds * chips
        self.dollars += seconds * chips * dollars_an_hour / 3600


_QUEUED = text("status = 'queued'")
_RUNNING = text("status = 'in_progress'")
Index("jobs_of_owner", Job.owner, Job.sequence)
Index("jobs_idempotency", Job.owner, Job.idempotency_key, unique=True)  # rows without a key don't collide
Index("jobs_queue", Job.priority.desc(), Job.round, Job.sequence, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
Index("jobs_running", Job.lease_expires_at, sqlite_where=_RUNNING, postgresql_where=_RUNNING)
Index("jobs_outcomes", Job.error_code, Job.status, Job.deleted_at)  # for counts, which read nothing else
Index("jobs_expiry", Job.expires_at)


class File(Table, kw_only=True):
    """A file that a job may have in storage, recorded before it is written; `delete_at`: when to delete it, if ever."""

    __tablename__ = "files"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    job: Mapped[str | None] = mapped_column(String(64), default=None)
    attempt: Mapped[int | None] = mapped_column(default=None)
    delete_at: Mapped[float | None] = mapped_column(default=None)


Index("files_of_job", File.job)
Index("files_delete", File.delete_at)


class Heartbeat(Table, kw_only=True):
    """The latest heartbeat of a process of a service.

    kind     "ingress" or "worker"
    metrics  in Prometheus's text format
    """

    __tablename__ = "heartbeats"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    metrics: Mapped[str] = mapped_column(Text)
    received_at: Mapped[float] = mapped_column(default=0.0, compare=False)  # set when it is recorded


class Delivery(Table, kw_only=True):
    """A webhook to call at a job's end. `due_at`: when to try next; None while the job hasn't ended."""

    __tablename__ = "deliveries"

    job_id: Mapped[str] = mapped_column("job", String(64), primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    attempts: Mapped[int] = mapped_column(default=0)
    due_at: Mapped[float | None] = mapped_column(default=None)
    job: Mapped[Job] = relationship(
        primaryjoin=lambda: foreign(Delivery.job_id) == Job.id, viewonly=True, lazy="joined", innerjoin=True, init=False
    )


Index("deliveries_due", Delivery.due_at)


class ApiKey(Table, kw_only=True):
    """An API key. A revoked one stays as a row, so that a database in which one was ever made goes on requiring one.

    id                   16 hex digits; the owner of its jobs
    name                 for people
    secret_hash          SHA-256 of the secret, hex
    requests_per_minute  at most so many, on average; None for no limit
    scopes               what it may do, comma-separated: "make", "read", "operate"
    waiting              jobs of it that may wait; None for the service's share of the queue
    running              jobs of it that are made at a time; None for no limit
    priority             the highest that it may ask for
    expires_at           from when it opens nothing; None for never
    revoked_at           None while it is in force
    """

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    secret_hash: Mapped[str] = mapped_column(String(64))
    requests_per_minute: Mapped[float | None] = mapped_column(default=None)
    scopes: Mapped[str] = mapped_column(String(64), default="make,read")
    waiting: Mapped[int | None] = mapped_column(default=None)
    running: Mapped[int | None] = mapped_column(default=None)
    priority: Mapped[int] = mapped_column(default=0)
    expires_at: Mapped[float | None] = mapped_column(default=None)
    created_at: Mapped[float] = mapped_column(default=0.0)  # set when it is recorded
    revoked_at: Mapped[float | None] = mapped_column(default=None)


class Usage(Table, kw_only=True):
    """What the jobs of a key that ended on one day (UTC, "2026-11-25") have come to; it outlives them."""

    __tablename__ = "usage"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    videos: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    chip_seconds: Mapped[float] = mapped_column(default=0.0)
    dollars: Mapped[float] = mapped_column(default=0.0)
