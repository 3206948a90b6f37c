"""The video that a job begins as, or continues."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("input_video", sa.Text()))
