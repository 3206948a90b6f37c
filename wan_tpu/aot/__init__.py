"""Compile programs ahead of time, for devices that are here or only described, and keep the executables."""
