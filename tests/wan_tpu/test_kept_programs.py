"""Programs that one process compiles are loaded by the next, without any option."""

import json
import os

import pytest

from tests.children import run_module


@pytest.mark.long
def test_second_process_compiles_nothing(checkpoint, tmp_path):
    def encode(cache):
        """Encode a prompt in a process of its own; return how many programs were loaded, and how many compiled."""
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        arguments = checkpoint("wan2.1-t2v-1.3b"), tmp_path / "counts.json"
        run_module("tests.wan_tpu.kept_worker", *arguments, environment=environment | {"WAN_TPU_CACHE": str(cache)})
        counts = json.loads((tmp_path / "counts.json").read_text())
        return counts["loaded"], counts["compiled"]

    loaded, compiled = encode(tmp_path / "cache")
    assert loaded == 0 and compiled > 0
    assert encode(tmp_path / "cache") == (compiled, 0)
    (tmp_path / "file").touch()
    assert encode(tmp_path / "file") == (0, 0)  # Nothing can be kept there.
