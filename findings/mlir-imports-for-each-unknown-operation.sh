#!/usr/bin/env bash
# What it costs to look at the operations of an MLIR dialect that has no Python module.
#
# Guess: with allow_unregistered_dialects, an operation that nobody registered is read as a plain operation; a dialect's
# Python module is searched once, and that there is none is remembered.
# Seen (jax and jaxlib 0.12.0.1): the bodies of Pallas kernels for TPUs are stored in the dialect stable_mosaic, which has
# no module. Each operation that is visited imports one in vain, from three packages: 14,009 operations, 42,027 searches.
# Walking them takes over a hundred times as long as after an empty module of that name is put into sys.modules.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python in python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
  "$python" -c "import ensurepip" 2> /dev/null && break
done
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1
cd "$folder"
cat > walk.py <<'END'
import base64
import json
import re
import sys
import time
import types
from collections import Counter

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.lowering import JaxIrContext, upstream_dialects
from jax.extend.mlir import ir
from jaxlib.mosaic.python import tpu

searched = Counter()


class Count:
    def find_spec(self, name, path=None, target=None):
        searched[name] += 1


def kernel(x, y):
    value = x[...]
    for _ in range(2000):
        value = value * x[...] + 1
    y[...] = value


def walk(operation):
    return 1 + sum(walk(inner.operation) for region in operation.regions for block in region for inner in block)


def measure():
    searched.clear()
    context = JaxIrContext()
    context.append_dialect_registry(upstream_dialects)
    context.load_all_available_dialects()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        module = ir.Module.parse(body)
        start = time.process_time()
        operations = walk(module.operation)
        return operations, time.process_time() - start, {n: c for n, c in searched.items() if "stable_mosaic" in n}


x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
text = jax.jit(pl.pallas_call(kernel, x)).trace(x).lower(lowering_platforms=("tpu",)).as_text()
config = json.loads(re.search(r'backend_config = "(.*?)"', text)[1].replace("\\22", '"'))
body = base64.b64decode(config["custom_call_config"]["body"])
sys.meta_path.insert(0, Count())
operations, seconds, names = measure()
sys.modules["jaxlib.mlir.dialects.stable_mosaic"] = types.ModuleType("stable_mosaic")
_, quick, none = measure()
print(operations, "operations", round(seconds / quick), "times as long", names, none)
assert all(count >= operations - 2 for count in names.values()) and len(names) == 3 and not none and seconds > 8 * quick
END
JAX_PLATFORMS=cpu "$folder/venv/bin/python" walk.py
