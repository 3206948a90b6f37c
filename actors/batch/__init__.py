"""Batches: read a manifest, and write a video and a record for each of its lines."""
