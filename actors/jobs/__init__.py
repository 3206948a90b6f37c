"""Durable jobs in a database: every accepted job is finished, or failed with a reason, whichever process dies."""
