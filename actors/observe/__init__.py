"""What people watch: spans, status, metrics, timelines, the console's line, logs."""
