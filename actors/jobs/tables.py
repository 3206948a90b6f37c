"""The tables, as they are after the last migration. A change here needs a migration; a test compares the two."""

from sqlalchemy import JSON, BigInteger, Column, Float, Index, Integer, MetaData, String, Table, Text, text

metadata = MetaData()

# SQLite counts up by itself in a column of exactly this type.
_SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
_QUEUED = text("status = 'queued'")
_RUNNING = text("status = 'in_progress'")

jobs = Table(
    "jobs",
    metadata,
    Column("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("owner", String(64), nullable=False),
    Column("status", String(16), nullable=False),
    Column("request", JSON, nullable=False),
    Column("input_image", Text),
    Column("priority", Integer, nullable=False),
    Column("turn", BigInteger, nullable=False),
    Column("deadline", Float),
    Column("idempotency_key", String(255)),
    Column("body_digest", String(64), nullable=False),
    Column("error_code", String(64)),
    Column("error_message", Text),
    Column("stop_code", String(64)),
    Column("progress", JSON(none_as_null=True)),
    Column("attempts", Integer, nullable=False),
    Column("losses", Integer, nullable=False),
    Column("worker", String(255)),
    Column("lease_token", String(64)),
    Column("lease_expires_at", Float),
    Column("results", JSON, nullable=False),
    Column("stage_seconds", JSON, nullable=False),
    Column("chip_seconds", Float, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("expires_at", Float),
    sqlite_autoincrement=True,  # a number is never used again, so that pages stay in order after deletions
)
Index("jobs_of_owner", jobs.c.owner, jobs.c.sequence)
Index("jobs_idempotency", jobs.c.owner, jobs.c.idempotency_key, unique=True)  # rows without a key don't collide
Index(
    "jobs_queue",
    jobs.c.priority.desc(),
    jobs.c.turn,
    jobs.c.sequence,
    sqlite_where=_QUEUED,
    postgresql_where=_QUEUED,
)
Index("jobs_running", jobs.c.lease_expires_at, sqlite_where=_RUNNING, postgresql_where=_RUNNING)
Index("jobs_outcomes", jobs.c.error_code, jobs.c.status)  # for counts, which read nothing else
Index("jobs_expiry", jobs.c.expires_at)

# Every file that a job may have in storage, recorded before it is written. `doomed_at`: when it is to be removed.
files = Table(
    "files",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("job", String(64)),
    Column("attempt", Integer),
    Column("doomed_at", Float),
)
Index("files_of_job", files.c.job)
Index("files_doomed", files.c.doomed_at)

# What a process says of itself, again and again: who it is, what it counts.
notices = Table(
    "notices",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("content", Text, nullable=False),
    Column("told_at", Float, nullable=False),
)

# Whom to tell of a job's end. `due_at`: when to try next; none while the job hasn't ended.
deliveries = Table(
    "deliveries",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("url", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("due_at", Float),
)
Index("deliveries_due", deliveries.c.due_at)
