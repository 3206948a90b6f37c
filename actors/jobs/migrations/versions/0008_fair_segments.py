"""How many segments of a job are left, by which jobs take turns, and its last segment before the video is joined."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_JOBS = sa.table(
    "jobs", sa.column("id"), sa.column("status"), sa.column("request", sa.JSON), sa.column("segments_left")
)
_QUEUED = sa.text("status = 'queued'")


def upgrade() -> None:
    """Add the columns, fill them for jobs that wait or run, and let indexes cover what is read often.

    Processes of an earlier version go on adding rows without them, each of which then counts as one segment.
    """
    op.add_column("jobs", sa.Column("made", sa.JSON()))
    op.add_column("jobs", sa.Column("segments_left", sa.Integer(), nullable=False, server_default="1"))
    waiting = sa.select(_JOBS.c.id, _JOBS.c.request).where(_JOBS.c.status.in_(("queued", "in_progress")))
    connection = op.get_bind()
    for id_, request in connection.execute(waiting).all():
        if later := len(request.get("next_prompts") or ()):
            connection.execute(sa.update(_JOBS).where(_JOBS.c.id == id_).values(segments_left=1 + later))
    op.drop_index("jobs_queue", "jobs")
    columns = [sa.text(name) for name in ("priority DESC", "round", "sequence", "owner", "segments_left")]
    op.create_index("jobs_queue", "jobs", columns, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
    op.drop_index("fragments_of_job", "fragments")
    op.create_index("fragments_of_run", "fragments", ["job", "attempt", "run", "number"])
