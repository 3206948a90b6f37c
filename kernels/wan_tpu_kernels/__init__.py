"""Pallas TPU kernels, each behind one function with a plain-jnp twin. Imports jax only."""
