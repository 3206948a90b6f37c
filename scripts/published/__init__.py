"""Programs whose measured times others have published, rebuilt from the published settings."""
