"""Encodes a prompt in a process whose JAX has no cache but the folder of executables.

usage: kept_programs_worker.py CHECKPOINT EXECUTABLES
"""

import sys

import jax

from wan_tpu import GenerationRequest, load_pipeline

if __name__ == "__main__":
    checkpoint, executables = sys.argv[1:]
    jax.config.update("jax_compilation_cache_dir", None)  # The tests have one for all.
    pipe = load_pipeline(checkpoint, "float32", (1, 1, 1), executables=executables)
    pipe.encode(pipe.plan(GenerationRequest(prompt="a cat", height=32, width=32, frames=1, guidance_scale=1.0)))
