"""Helios: a video is made chunk after chunk, each conditioned on the frames before it."""
