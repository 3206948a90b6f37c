"""What people look at: timelines, the console's line, logs."""
