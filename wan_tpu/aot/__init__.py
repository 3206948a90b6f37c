"""Make programs: compile them ahead of time, for devices that are here or described, and keep the executables."""
