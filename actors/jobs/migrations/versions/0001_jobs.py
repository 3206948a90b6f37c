"""The first schema. A database that has none gets the tables of `actors.jobs.tables` at once, without these steps."""

revision = "0001"
down_revision = None
