"""The pipeline across slices: its driver, client, queue, deployment and status."""
