"""What Alembic runs: the steps that are missing, in the transaction of the connection it was given."""

from alembic import context

from actors.jobs.tables import Table

context.configure(connection=context.config.attributes["connection"], target_metadata=Table.metadata)
context.run_migrations()
