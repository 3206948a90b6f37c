"""A model on devices: mesh, weights, compiled programs, and the bridge from torch to JAX."""
