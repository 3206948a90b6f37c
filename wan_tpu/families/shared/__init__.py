"""What families share: a causal VAE run chunk by chunk, counting operations."""
