"""The first schema. A new database gets the tables of `actors.jobs.tables` directly, without these steps."""

revision = "0001"
down_revision = None
