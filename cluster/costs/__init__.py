"""The cost of slices, and of the videos that layouts of them make."""
