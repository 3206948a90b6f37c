"""What touches bytes that clients send: parsers, most of them in processes that can reach nothing else."""
