"""The Wan family: Wan 2.1 and 2.2."""
