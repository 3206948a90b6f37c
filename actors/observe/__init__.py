"""Observability: spans, status, metrics, timelines, the progress line on the console, logs."""
