"""Clusters of Ray nodes on this machine that look like TPU hosts."""
