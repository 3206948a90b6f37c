"""A slice as one worker on every host, called in lockstep."""
