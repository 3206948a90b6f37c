"""The HTTP API: the `/v1/videos` API over the jobs of a database."""
