"""What a program costs on a TPU, found out without one: ahead-of-time compilation and its analysis."""
