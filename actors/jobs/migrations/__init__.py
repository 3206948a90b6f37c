"""Migrations of the schema, one file each; `actors.jobs.migrations.migrate` runs them."""
