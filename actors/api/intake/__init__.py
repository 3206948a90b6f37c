"""What clients send: received within limits, and parsed in processes that can reach nothing else."""
