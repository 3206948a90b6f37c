"""The HTTP API: OpenAI's videos API over the jobs of a database."""
