"""How the schema came to be, one step a file; `actors.jobs.migrations.migrate` runs them."""
