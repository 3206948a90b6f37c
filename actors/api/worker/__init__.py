"""The worker: claims jobs, has their videos made, and keeps queue and storage in order."""
