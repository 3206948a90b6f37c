"""What the TPU compiler says of programs, on a machine without a TPU."""
