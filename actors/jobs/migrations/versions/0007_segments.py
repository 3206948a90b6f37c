"""The finished segments of a job that makes several."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns. Processes of an earlier version go on adding rows without them."""
    op.add_column("jobs", sa.Column("segments", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("segments_end", sa.Text()))
