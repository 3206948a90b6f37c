"""Adapters (LoRA): read their files in all common formats, and apply them to experts' weights."""
