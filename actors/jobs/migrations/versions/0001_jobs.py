"""Jobs, claimed in order of priority and acceptance."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the table of jobs."""
    queued, running = sa.text("status = 'queued'"), sa.text("status = 'in_progress'")
    op.create_table(
        "jobs",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("input_image", sa.Text),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("deadline", sa.Float),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("body_digest", sa.String(64), nullable=False),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.Text),
        sa.Column("stop_code", sa.String(64)),
        sa.Column("progress", sa.JSON),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("losses", sa.Integer, nullable=False),
        sa.Column("worker", sa.String(255)),
        sa.Column("lease_token", sa.String(64)),
        sa.Column("lease_expires_at", sa.Float),
        sa.Column("results", sa.JSON, nullable=False),
        sa.Column("stage_seconds", sa.JSON, nullable=False),
        sa.Column("chip_seconds", sa.Float, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("expires_at", sa.Float),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_of_owner", "jobs", ["owner", "sequence"])
    op.create_index("jobs_idempotency", "jobs", ["owner", "idempotency_key"], unique=True)
    op.create_index(
        "jobs_queue",
        "jobs",
        [sa.text("priority DESC"), "sequence"],
        sqlite_where=queued,
        postgresql_where=queued,
    )
    op.create_index("jobs_running", "jobs", ["lease_expires_at"], sqlite_where=running, postgresql_where=running)
    op.create_index("jobs_outcomes", "jobs", ["error_code", "status"])
    op.create_index("jobs_expiry", "jobs", ["expires_at"])


def downgrade() -> None:
    """Refuse: an older program would lose what a newer one has accepted."""
    raise NotImplementedError(
        "the database of jobs is never taken back a version; restore a copy made before the upgrade"
    )
