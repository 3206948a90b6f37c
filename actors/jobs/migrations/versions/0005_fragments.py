"""Fragments of videos, for clients that watch while a video is decoded."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("watched_at", sa.Float()))
    op.add_column("jobs", sa.Column("fragments", sa.Integer()))
    op.create_table(
        "fragments",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
    )
    op.create_index("fragments_of_job", "fragments", ["job"])
