"""What clients send: received within bounds, and taken apart in processes that have little else."""
