"""Hosts that wait instead of computing, and what is measured with them."""
