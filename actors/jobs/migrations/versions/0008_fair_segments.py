"""How many segments of a job are left, its last one before the video is joined, and files that several jobs need."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_JOBS = sa.table(
    "jobs", sa.column("id"), sa.column("status"), sa.column("request", sa.JSON), sa.column("segments_left")
)
_QUEUED = sa.text("status = 'queued'")


def upgrade() -> None:
    """Add columns and a table, fill them for jobs that wait or run, and add indexes over what is read often.

    Processes of an earlier version go on adding rows without the columns, each of which then counts as one segment.
    They share no files, and remove none that are shared.
    """
    op.add_column("jobs", sa.Column("made", sa.JSON()))
    op.add_column("jobs", sa.Column("segments_left", sa.Integer(), nullable=False, server_default="1"))
    waiting = sa.select(_JOBS.c.id, _JOBS.c.request).where(_JOBS.c.status.in_(("queued", "in_progress")))
    connection = op.get_bind()
    for id_, request in connection.execute(waiting).all():
        if later := len(request.get("next_prompts") or ()):
            connection.execute(sa.update(_JOBS).where(_JOBS.c.id == id_).values(segments_left=1 + later))
    columns = ["owner", "model", "segments_left", "priority", "round", "sequence", "status"]
    op.create_index("jobs_room", "jobs", columns, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
    op.drop_index("fragments_of_job", "fragments")
    op.create_index("fragments_of_run", "fragments", ["job", "attempt", "run", "number"])
    op.create_table(
        "file_shares",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("job", sa.String(64), primary_key=True),
    )
