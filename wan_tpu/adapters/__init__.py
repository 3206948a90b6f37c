"""Adapters (LoRA): files as they are found in the wild, and experts' weights with them applied."""
