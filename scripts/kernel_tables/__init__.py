"""Kernels as they are compiled to be counted, and the tables of their bundles."""
