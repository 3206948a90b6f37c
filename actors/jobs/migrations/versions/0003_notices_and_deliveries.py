"""Processes leave notices of themselves; ends of jobs are told to webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the two tables."""
    op.create_table(
        "notices",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("told_at", sa.Float, nullable=False),
    )
    op.create_table(
        "deliveries",
        sa.Column("job", sa.String(64), primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", sa.Float),
    )
    op.create_index("deliveries_due", "deliveries", ["due_at"])


def downgrade() -> None:
    """Refuse: an older program would tell nobody."""
    raise NotImplementedError(
        "the database of jobs is never taken back a version; restore a copy made before the upgrade"
    )
