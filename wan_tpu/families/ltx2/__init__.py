"""LTX-2: video with sound."""
