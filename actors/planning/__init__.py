"""What a model takes on slices that nobody has rented yet."""
