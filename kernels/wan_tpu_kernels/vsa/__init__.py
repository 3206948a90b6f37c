"""Video sparse attention: kernels whose lists of keys are of 64 queries each."""
