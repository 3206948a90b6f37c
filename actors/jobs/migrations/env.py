"""Entry point of Alembic: runs the missing migrations in the transaction of the connection that `migrate` passes."""

from alembic import context

from actors.jobs.tables import Table

context.configure(connection=context.config.attributes["connection"], target_metadata=Table.metadata)
context.run_migrations()
