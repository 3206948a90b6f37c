"""Files that several jobs need, and an index for the room in the queue."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_QUEUED = sa.text("status = 'queued'")


def upgrade() -> None:
    """Add a table and an index. Processes of an earlier version share no files, and remove none that are shared."""
    op.create_table(
        "file_shares",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("job", sa.String(64), primary_key=True),
    )
    columns = ["owner", "model", "segments_left", "priority", "round", "sequence", "status"]
    op.create_index("jobs_room", "jobs", columns, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
