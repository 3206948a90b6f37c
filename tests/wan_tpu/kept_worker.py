"""Encodes a prompt. test_kept_programs.py runs it in a process without JAX's own folder of programs.

Arguments: a checkpoint's folder, and where to write how many programs were loaded, and how many compiled.
"""

import json
import sys
from pathlib import Path

import jax

from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.aot.kept import count_programs

folder, out = map(Path, sys.argv[1:])
jax.config.update("jax_compilation_cache_dir", None)  # The process was forked from one that has imported JAX.
pipe = load_pipeline(folder, "float32", (1, 1, 1))
pipe.encode(pipe.plan(GenerationRequest(prompt="a cat", height=32, width=32, frames=1, guidance_scale=1.0)))
out.write_text(json.dumps(count_programs()))
