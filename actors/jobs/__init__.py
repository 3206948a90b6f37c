"""Durable jobs in a database: a job once accepted is finished, or failed with a reason, whatever process dies."""
