"""The worker: claims jobs, has their videos made, and maintains the queue and the storage."""
