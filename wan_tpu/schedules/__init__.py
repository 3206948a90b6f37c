"""Schedules: what a scheduler does in every step, as a table of numbers."""
