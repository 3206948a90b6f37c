"""Where a model's files come from, and whose fault it is when one can't be read."""
