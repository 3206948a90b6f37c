"""What compiled TPU programs cost, found out without a TPU."""
