"""Batches: a manifest in, a video and a record for each of its lines out."""
