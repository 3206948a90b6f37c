"""Where inputs, results and snapshots live: a folder or gs://."""
