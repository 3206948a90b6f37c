"""The actor that leads a slice, and the worker on each of its hosts."""
