"""What the service does, without its routes: it accepts a body as a job, and reads and follows jobs."""
