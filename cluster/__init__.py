"""TPU generations, slices, layouts, and the clusters that have them. Nothing here knows about video."""
