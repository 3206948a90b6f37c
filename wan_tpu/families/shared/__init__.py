"""Code that families share: a causal VAE run chunk by chunk, layers, tokens, tokenizers, counting operations."""
