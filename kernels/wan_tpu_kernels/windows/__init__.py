"""Kernels of blocks whose tokens attend to a window around them, on strips of a picture."""
