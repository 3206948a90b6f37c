"""A column for the model of a job, since a query that looks into a client's JSON fails on some texts."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_JOBS = sa.table("jobs", sa.column("id"), sa.column("status"), sa.column("request", sa.JSON), sa.column("model"))


def upgrade() -> None:
    """Add the column, and fill it for jobs that wait or run. Nobody needs it of jobs that have ended."""
    op.add_column("jobs", sa.Column("model", sa.String(200)))
    waiting = sa.select(_JOBS.c.id, _JOBS.c.request).where(_JOBS.c.status.in_(("queued", "in_progress")))
    connection = op.get_bind()
    for id_, request in connection.execute(waiting).all():
        model = str(request.get("model", ""))
        connection.execute(sa.update(_JOBS).where(_JOBS.c.id == id_).values(model=model))
