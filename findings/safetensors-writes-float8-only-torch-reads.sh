#!/usr/bin/env bash
# safetensors writes arrays of 8-bit floats from NumPy and JAX, and can't read them as either.
#
# Guess: what `safetensors.numpy` and `safetensors.flax` save, they load: float8 as bfloat16, which both know by way of
# ml_dtypes; bytes as files.
# Seen (safetensors 0.8.0, numpy 2.5.5, ml_dtypes 0.6.0, jax 0.12.0.1): all five types of float8 are written, with the
# right names in the header. `load_file` and `safe_open` then look for the type in numpy itself, and raise
# AttributeError ("module 'numpy' has no attribute 'float8_e4m3fn'"); `load`, for bytes, raises KeyError. bfloat16 is
# read by `load_file`, but not by `load` (KeyError: 'BF16'). PyTorch reads all of them.
#
# So a JAX program that keeps weights in float8 reads them as PyTorch tensors, or by their offsets in the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python in python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
  "$python" -c "import ensurepip" 2> /dev/null && break
done
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.5.5 ml_dtypes==0.6.0 jax==0.12.0.1 jaxlib==0.12.0.1
cd "$folder"
cat > read.py <<'END'
import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.flax
import safetensors.numpy

NAMES = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
LIBRARIES = {
    "numpy": (safetensors.numpy, lambda name: np.ones((2, 4), getattr(ml_dtypes, name))),
    "flax": (safetensors.flax, lambda name: jnp.ones((2, 4), name)),
}


def fails(read, given, error):
    """Return whether a function raises an error for what it is given."""
    try:
        read(given)
    except error as reason:
        print("  ", type(reason).__name__, reason)
        return True
    return False


for library, (module, make) in LIBRARIES.items():
    for name, in_file in NAMES.items():
        module.save_file({"a": make(name)}, "a.safetensors")
        data = Path("a.safetensors").read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert header["a"]["dtype"] == in_file, header
        print(library, name, "is written as", in_file)
        assert fails(module.load, data, KeyError)
        if name == "bfloat16":
            assert module.load_file("a.safetensors")["a"].dtype == "bfloat16"
        else:
            assert fails(module.load_file, "a.safetensors", AttributeError)
END
JAX_PLATFORMS=cpu "$folder/venv/bin/python" read.py
