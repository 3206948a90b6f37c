"""HunyuanVideo-1.5: makes videos as diffusers does, on one device and on several.

It doesn't register itself (`FAMILY`) yet, so nothing finds it: on a TPU attention must take the number of keys from an
array first, as the context's length changes from prompt to prompt.
"""
