"""A slice as one process on every host, called in lockstep."""
