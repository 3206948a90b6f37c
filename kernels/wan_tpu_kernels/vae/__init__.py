"""Kernels of video VAEs: convolutions and group norms."""
