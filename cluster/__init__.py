"""Where programs run: TPU generations, slices and, in time, the clusters that hold them. Knows nothing of video."""
