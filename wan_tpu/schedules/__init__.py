"""Schedules: the work of a scheduler in every step, as a table of numbers."""
