"""How many bytes each file has, and the key that caused it."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the columns and an index over them. Files of earlier versions go on without an owner, and aren't counted."""
    op.add_column("files", sa.Column("owner", sa.String(64)))
    op.add_column("files", sa.Column("size", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("files_of_owner", "files", ["owner", "size"])
