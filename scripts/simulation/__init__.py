"""Hosts that wait instead of computing, and measurements with them."""
