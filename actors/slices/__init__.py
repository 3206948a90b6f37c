"""The actor that leads a slice, and what runs on each of its hosts."""
