"""What slices cost, and what layouts of them make of it."""
