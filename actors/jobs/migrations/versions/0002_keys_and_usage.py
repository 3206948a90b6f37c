"""Scopes, limits and expiry of keys; usage; deletion, remixing and cost of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    for column in (
        sa.Column("scopes", sa.String(64), nullable=False, server_default="make,read"),
        sa.Column("waiting", sa.Integer()),
        sa.Column("running", sa.Integer()),
        sa.Column("priority", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("expires_at", sa.Float()),
    ):
        op.add_column("api_keys", column)
    for column in (
        sa.Column("dollars", sa.Float(), nullable=False, server_default="0"),
        sa.Column("remixed_from", sa.String(64)),
        sa.Column("deleted_at", sa.Float()),
    ):
        op.add_column("jobs", column)
    op.drop_index("jobs_outcomes", "jobs")
    op.create_index("jobs_outcomes", "jobs", ["error_code", "status", "deleted_at"])
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("videos", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("chip_seconds", sa.Float(), nullable=False),
        sa.Column("dollars", sa.Float(), nullable=False),
    )
