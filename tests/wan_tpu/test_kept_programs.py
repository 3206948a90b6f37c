"""Programs that one process compiles are loaded by the next, without any option."""

import json
import os
import subprocess
import sys

import pytest

ENCODE = """
import json, sys
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.aot.kept import count_programs
pipe = load_pipeline(sys.argv[1], "float32", (1, 1, 1))
pipe.encode(pipe.plan(GenerationRequest(prompt="a cat", height=32, width=32, frames=1, guidance_scale=1.0)))
print(json.dumps(count_programs()))
"""


def encode(checkpoint, **environment):
    """Encode a prompt in a process of its own; return how many programs were loaded, and how many compiled."""
    variables = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-c", ENCODE, str(checkpoint)]
    done = subprocess.run(command, env=variables | environment, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout.splitlines()[-1])
    return counts["loaded"], counts["compiled"]


@pytest.mark.long
def test_second_process_compiles_nothing(checkpoint, tmp_path):
    folder = checkpoint("wan2.1-t2v-1.3b")
    loaded, compiled = encode(folder, WAN_TPU_CACHE=str(tmp_path / "cache"))
    assert loaded == 0 and compiled > 0
    assert encode(folder, WAN_TPU_CACHE=str(tmp_path / "cache")) == (compiled, 0)
    (tmp_path / "file").touch()
    assert encode(folder, WAN_TPU_CACHE=str(tmp_path / "file")) == (0, 0)  # Nothing can be kept there.
