"""Memory, time and cost of a model on slices that nobody has rented yet."""
