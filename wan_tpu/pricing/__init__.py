"""The cost of compiled TPU programs, determined without a TPU."""
