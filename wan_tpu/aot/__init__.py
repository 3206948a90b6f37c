"""Compile programs ahead of time, for devices that are present or only described, and store the executables."""
