"""The HTTP service: the `/v1/videos` API, backed by jobs in a database."""
