"""The tables, each as the class of its rows. A change here needs a migration for older databases.

Rows stay readable as plain values after their transaction. Times are Unix seconds by the database's clock.
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

from actors.jobs.stored_request import read_redo, read_stored, to_stored
from actors.jobs.values import Progress, Status, make_id


class Table(MappedAsDataclass, DeclarativeBase):
    type_annotation_map: ClassVar = {float: Float}  # SQLAlchemy would use Double otherwise.


_COMPILES = ", compiling"  # At the end of a stored progress' stage while its slice compiles.


class _ProgressColumn(TypeDecorator[Progress]):
    impl = JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Progress | None, dialect: Dialect) -> dict[str, Any] | None:
        if value is None:
            return None
        stored = dict(vars(value))
        # An earlier version, which may run beside this one during an upgrade, reads no other keys: it shows this stage.
        if stored.pop("compiles"):
            stored["stage"] += _COMPILES
        return stored

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> Progress | None:
        if value is None:
            return None
        known = {field.name: value[field.name] for field in dataclasses.fields(Progress) if field.name in value}
        stage = known["stage"].removesuffix(_COMPILES)
        return Progress(**known | {"stage": stage, "compiles": stage != known["stage"]})


class _RequestColumn(TypeDecorator[dict[str, Any]]):
    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: dict[str, Any] | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else to_stored(value)

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else read_stored(value)


class Job(Table, kw_only=True):
    """A job. Whoever submits it sets its owner, its request and the client's other choices; the queue sets the rest."""

    __tablename__ = "jobs"

    # Increases in the order in which jobs are accepted.
    sequence: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"),  # SQLite increments only columns of exactly this type.
        primary_key=True,
        autoincrement=True,
        default=None,
    )
    id: Mapped[str] = mapped_column(String(64), unique=True, default_factory=make_id)
    # Id of the API key that the job belongs to; "" if the service has no keys.
    owner: Mapped[str] = mapped_column(String(64))
    status: Mapped[Status] = mapped_column(String(16), default="queued")
    # The accepted request as plain JSON. It holds text from clients, so no query looks into it. It has the fields of a
    # resolved `wan_tpu.request.GenerationRequest` except images, with adapters by name, and those of
    # `stored_request.JOB_FIELDS`.
    request: Mapped[dict[str, Any]] = mapped_column(_RequestColumn)
    # Name of the model that the job was accepted for; None if a program before schema 0004 accepted it.
    model: Mapped[str | None] = mapped_column(String(200), default=None)
    # Name of the first frame in storage, recorded with `Retention.reserve` before it was written.
    input_image: Mapped[str | None] = mapped_column(Text, default=None)
    input_last_image: Mapped[str | None] = mapped_column(Text, default=None)  # The same for the last frame.
    # The same for the video that the new video begins as or, if the request has `source_frames`, that it continues.
    input_video: Mapped[str | None] = mapped_column(Text, default=None)
    # Names in storage of its finished segments, in order, if it makes several (`next_prompts`). A later attempt begins
    # after them. Their files are deleted once the job has ended.
    segments: Mapped[list[str]] = mapped_column(JSON, default_factory=list)
    # The same for the last frame of the newest of them (PNG), which the next one begins with.
    segments_end: Mapped[str | None] = mapped_column(Text, default=None)
    # The same for what its last segment has become, by variant; None until that is stored. All that is left then is to
    # join the segments and to make thumbnails. Versions before schema 0008 make that segment again.
    last_segment: Mapped[dict[str, str] | None] = mapped_column("made", JSON(none_as_null=True), default=None)
    # How many segments are still to be made. Limits and turns count them.
    segments_left: Mapped[int] = mapped_column(default=1, server_default="1")
    # Jobs of higher priority are claimed first; owners of equal priority take turns (round-robin).
    priority: Mapped[int] = mapped_column(default=0)
    # Number of the turn in that round-robin: in each round one job of every owner is claimed.
    round: Mapped[int] = mapped_column(BigInteger, default=0)
    # A job that hasn't ended by then fails with code "deadline_exceeded".
    deadline: Mapped[float | None] = mapped_column(default=None)
    # A request of the same owner with the same key and body refers to the same job.
    idempotency_key: Mapped[str | None] = mapped_column(String(255), default=None)
    # Digest of the body that the client sent, for that comparison.
    body_digest: Mapped[str] = mapped_column(String(64), default="")
    error_code: Mapped[str | None] = mapped_column(String(64), default=None)
    error_message: Mapped[str | None] = mapped_column(Text, default=None)
    # Why a running job must stop ("cancelled", "deadline_exceeded"), if it must.
    stop_code: Mapped[str | None] = mapped_column(String(64), default=None)
    progress: Mapped[Progress | None] = mapped_column(_ProgressColumn, default=None)
    attempts: Mapped[int] = mapped_column(default=0)  # How often the job was claimed.
    losses: Mapped[int] = mapped_column(default=0)  # How often its worker was lost.
    worker: Mapped[str | None] = mapped_column(String(255), default=None)
    lease_token: Mapped[str | None] = mapped_column(String(64), default=None, repr=False)
    lease_expires_at: Mapped[float | None] = mapped_column(default=None)
    # Names of the results in storage by variant ("video", "thumbnail", ...).
    results: Mapped[dict[str, str]] = mapped_column(JSON, default_factory=dict)
    # What the owner should know about the video, such as that a prompt was cut.
    warnings: Mapped[list[str]] = mapped_column(JSON, default_factory=list)
    # Measured seconds by stage, summed over attempts, as a worker last reported them.
    stage_seconds: Mapped[dict[str, float]] = mapped_column(JSON, default_factory=dict)
    chip_seconds: Mapped[float] = mapped_column(default=0.0)
    dollars: Mapped[float] = mapped_column(default=0.0)  # Cost of the chip-seconds, where prices are known.
    # Id of the job whose request this one repeats with another prompt.
    remixed_from: Mapped[str | None] = mapped_column(String(64), default=None)
    # When a client was last known to watch the video while it is decoded. Ingresses renew it, and fragments are stored
    # only for as long as they do.
    watched_at: Mapped[float | None] = mapped_column(default=None)
    # Counts fragments that were stored, or reused by a later run. A change tells followers that there is a new one. It
    # is None before the first, and from a failure to store one until another attempt stores its first.
    fragments: Mapped[int | None] = mapped_column(default=None)
    created_at: Mapped[float] = mapped_column(default=0.0)
    started_at: Mapped[float | None] = mapped_column(default=None)
    ended_at: Mapped[float | None] = mapped_column(default=None)
    expires_at: Mapped[float | None] = mapped_column(default=None)  # When the job and its files are removed.
    # When the owner deleted the job. It is hidden from then on, but lists can still continue after it.
    deleted_at: Mapped[float | None] = mapped_column(default=None)
    # Number of waiting jobs ahead of it; None if it doesn't wait, or if the query didn't ask for it.
    position: Mapped[int | None] = query_expression()

    # Numbers are never reused, so that pages stay in order after deletions.
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012 (SQLAlchemy's own)

    @property
    def inputs(self) -> list[str]:
        """Names of the input images and videos in storage."""
        references, redo = self.request.get("reference_files", ()), read_redo(self.request)
        taken = () if redo is None else redo.files
        names = (self.input_image, self.input_last_image, self.input_video, *references, *taken)
        names = (*names, self.request.get("end_file"))
        return [name for name in names if name is not None]

    @property
    def needed_files(self) -> list[str]:
        """Names of the files in storage that the next attempt needs."""
        last_frame = [] if self.segments_end is None else [self.segments_end]
        return [*self.inputs, *self.segments, *last_frame, *(self.last_segment or {}).values(), *self.results.values()]

    @property
    def finished_segments(self) -> int:
        """How many of its segments are stored."""
        return len(self.segments) + (self.last_segment is not None)

    @property
    def has_ended(self) -> bool:
        """Whether the job has completed or failed, and won't change any more."""
        return self.status in ("completed", "failed")

    def spend(self, stage: str, seconds: float, chips: int, dollars_an_hour: float = 0.0) -> None:
        """Add the cost of a stage's computation: its seconds, on how many chips, and the price of each chip."""
        self.stage_seconds = self.stage_seconds | {stage: self.stage_seconds.get(stage, 0.0) + seconds}
        self.chip_seconds += seconds * chips
        self.dollars += seconds * chips * dollars_an_hour / 3600


_QUEUED = text("status = 'queued'")
_RUNNING = text("status = 'in_progress'")
Index("jobs_of_owner", Job.owner, Job.sequence)
Index("jobs_idempotency", Job.owner, Job.idempotency_key, unique=True)  # Rows without a key don't collide.
Index("jobs_queue", Job.priority.desc(), Job.round, Job.sequence, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
# Room and estimates are computed from this index alone. It begins with the owner, so that no claim uses it. SQLite
# before 3.41 looks up even the column that all of its rows have in common.
Index(
    "jobs_room",
    *(Job.owner, Job.model, Job.segments_left, Job.priority, Job.round, Job.sequence, Job.status),
    sqlite_where=_QUEUED,
    postgresql_where=_QUEUED,
)
Index("jobs_running", Job.lease_expires_at, sqlite_where=_RUNNING, postgresql_where=_RUNNING)
Index("jobs_outcomes", Job.error_code, Job.status, Job.deleted_at)  # Counts read this index alone.
Index("jobs_expiry", Job.expires_at)


class File(Table, kw_only=True):
    """A file that a job may have in storage, recorded before it is written. `delete_at`: when to delete it, if ever."""

    __tablename__ = "files"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    job: Mapped[str | None] = mapped_column(String(64), default=None)
    attempt: Mapped[int | None] = mapped_column(default=None)
    # Id of the API key whose request caused it; "" without keys. None if a program before schema 0009 recorded it.
    owner: Mapped[str | None] = mapped_column(String(64), default=None)
    size: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # Bytes.
    delete_at: Mapped[float | None] = mapped_column(default=None)


Index("files_of_job", File.job)
Index("files_delete", File.delete_at)
Index("files_of_owner", File.owner, File.size)  # What a key's files take is summed from this index alone.


class FileShare(Table, kw_only=True):
    """A job's share in a file that others need as well. It ends when the job's row is deleted, or hidden."""

    __tablename__ = "file_shares"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    job: Mapped[str] = mapped_column(String(64), primary_key=True)


class StoredFragment(Table, kw_only=True):
    """A fragment of a video whose file is complete in storage. All fragments of a run, in order, are one mp4."""

    __tablename__ = "fragments"

    # Name of its file, which `File` has as well, and which is removed with this row.
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    job: Mapped[str] = mapped_column(String(64))
    attempt: Mapped[int] = mapped_column()
    run: Mapped[int] = mapped_column()  # Counts the decodings in an attempt, as `actors.engine.Fragment` does.
    number: Mapped[int] = mapped_column()  # Counts the fragments from the video's beginning on, over all of its parts.
    digest: Mapped[str] = mapped_column(String(64))  # SHA-256 of its bytes, in hex.


Index("fragments_of_run", StoredFragment.job, StoredFragment.attempt, StoredFragment.run, StoredFragment.number)


class CheckIn(Table, kw_only=True):
    """The latest check-in of a service's process (`actors.jobs.check_ins`)."""

    __tablename__ = "heartbeats"  # Its first name: processes of two versions share the table during an upgrade.

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))  # "ingress" or "worker".
    metrics: Mapped[str] = mapped_column(Text)
    received_at: Mapped[float] = mapped_column(default=0.0, compare=False)  # Set when it is recorded.


class Delivery(Table, kw_only=True):
    """A webhook to call when a job ends. `due_at` is when to try next, and None while the job hasn't ended."""

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
    """An API key. Revoked keys stay as rows, so that a database that ever had a key goes on requiring one."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)  # 16 hex digits; the owner of the key's jobs.
    name: Mapped[str] = mapped_column(String(64))
    secret_hash: Mapped[str] = mapped_column(String(64))  # SHA-256 of the secret, in hex.
    # The most requests it may send, on average; None for no limit.
    requests_per_minute: Mapped[float | None] = mapped_column(default=None)
    # What the key may do, comma-separated: some of `keys.SCOPES`.
    scopes: Mapped[str] = mapped_column(String(64), default="make,read")
    # How many segments of its jobs for one model may wait; None for the service's share of the queue.
    waiting: Mapped[int | None] = mapped_column(default=None)
    # How many of its jobs may run at a time; None for no limit.
    running: Mapped[int | None] = mapped_column(default=None)
    priority: Mapped[int] = mapped_column(default=0)
    expires_at: Mapped[float | None] = mapped_column(default=None)  # When the key expires; None for never.
    created_at: Mapped[float] = mapped_column(default=0.0)  # Set when it is recorded.
    # When the key was revoked; None while it is in force.
    revoked_at: Mapped[float | None] = mapped_column(default=None)


class Usage(Table, kw_only=True):
    """Totals of a key's jobs that ended on one day (UTC, such as "2026-11-25"). They outlive the jobs."""

    __tablename__ = "usage"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    videos: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    chip_seconds: Mapped[float] = mapped_column(default=0.0)
    dollars: Mapped[float] = mapped_column(default=0.0)
