"""Kernels of video VAEs: convolutions, group norms."""
