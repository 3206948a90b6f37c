"""Owners of one priority take turns; files are recorded before they are written."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Give jobs turns; make the table of files, with what jobs have so far."""
    queued = sa.text("status = 'queued'")
    op.add_column("jobs", sa.Column("turn", sa.BigInteger, nullable=False, server_default="0"))
    op.drop_index("jobs_queue", "jobs")
    op.create_index(
        "jobs_queue",
        "jobs",
        [sa.text("priority DESC"), "turn", "sequence"],
        sqlite_where=queued,
        postgresql_where=queued,
    )
    op.create_table(
        "files",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("job", sa.String(64)),
        sa.Column("attempt", sa.Integer),
        sa.Column("doomed_at", sa.Float),
    )
    op.create_index("files_of_job", "files", ["job"])
    op.create_index("files_doomed", "files", ["doomed_at"])
    _record_files()
    _number_turns()


def _record_files() -> None:
    connection = op.get_bind()
    jobs = sa.table("jobs", sa.column("id"), sa.column("input_image"), sa.column("results", sa.JSON))
    files = sa.table("files", sa.column("name"), sa.column("job"))
    rows = connection.execute(sa.select(jobs)).yield_per(1000)
    for row in rows:
        names = {*row.results.values(), *([row.input_image] if row.input_image else [])}
        for name in sorted(names):
            connection.execute(files.insert().values(name=name, job=row.id))


def _number_turns() -> None:
    """A waiting job's turn: how many of its owner, of equal priority, were accepted before it."""
    op.execute(
        "UPDATE jobs SET turn = (SELECT count(*) FROM jobs AS earlier WHERE earlier.owner = jobs.owner AND "
        "earlier.priority = jobs.priority AND earlier.status = 'queued' AND earlier.sequence < jobs.sequence) "
        "WHERE status = 'queued'"
    )


def downgrade() -> None:
    """Refuse: an older program would leave files behind."""
    raise NotImplementedError(
        "the database of jobs is never taken back a version; restore a copy made before the upgrade"
    )
