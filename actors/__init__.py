"""Glue: slices, stages and jobs on Ray."""
