"""Programs whose measured times others have published, built again from the settings that they name."""
