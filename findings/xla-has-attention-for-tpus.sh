#!/usr/bin/env bash
# XLA for TPUs replaces plain softmax attention by a kernel of its own, but only where logits aren't scaled or masked.
#
# Guess: `softmax(q k^T) v` in jnp is compiled as two products and fusions, so that all logits pass through memory; only
# Pallas makes it a single kernel.
# Seen (jax 0.12.0.1, libtpu 0.0.50.1; v5e, v5p, v6e, 7x; on v6e also float32, heads of 64, 512 and 8,192 keys): all of
# it becomes one Mosaic call with both products, exponentials and a running maximum, which no flag asked for. Logits
# multiplied by a constant, as attention usually has them, or with a mask or a bias, are compiled as guessed. A factor in
# q itself keeps the kernel.
#
# What counts a program's kernels by Pallas' names misses it, and what times "plain XLA attention" may time this.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python in python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
  "$python" -c "import ensurepip" 2> /dev/null && break
done
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 libtpu==0.0.50.1
cd "$folder"
cat > compile.py <<'END'
import base64
import json
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

CHANGES = {
    "plain": lambda q, logits: (q, logits),
    "scaled logits": lambda q, logits: (q, lambda x: logits(x) * 0.088),
    "masked logits": lambda q, logits: (q, lambda x: jnp.where(jnp.arange(2048) < 2000, logits(x), -1e9)),
    "biased logits": lambda q, logits: (q, lambda x: logits(x) + jnp.arange(2048) / 2048),
    "scaled queries": lambda q, logits: (q * q.dtype.type(0.088), logits),
}


def attention(q, k, v, change):
    q, logits = change(q, lambda q: jnp.einsum("nqd,nkd->nqk", q, k).astype(jnp.float32))
    return jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(logits(q), -1).astype(v.dtype), v)


def find_kernels(chip, change, keys=2048, width=128, dtype=jnp.bfloat16):
    """Return of each kernel how many products it has, and whether it has exponentials and a maximum that is kept."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0]
    shape = jax.ShapeDtypeStruct((16, keys, width), dtype, sharding=SingleDeviceSharding(device))
    program = jax.jit(lambda q, k, v: attention(q, k, v, change)).lower(shape, shape, shape)
    bodies = re.findall(r'"body":"([^"]+)"', program.compile().as_text())
    kernels = [base64.b64decode(body) for body in bodies]
    return [[body.count(b"vector.contract"), b"math.exp" in body, b"arith.maximumf" in body] for body in kernels]


for chip in ("v5e:2x2x1", "v5p:2x2x1", "v6e:2x2x1", "tpu7x:2x2x1"):
    found = {name: find_kernels(chip, change) for name, change in CHANGES.items()}
    print(chip, json.dumps(found))
    assert found == {name: [] for name in CHANGES} | dict.fromkeys(("plain", "scaled queries"), [[2, True, True]])
for settings in ({"dtype": jnp.float32}, {"width": 64}, {"keys": 512}, {"keys": 8192}):
    assert find_kernels("v6e:2x2x1", CHANGES["plain"], **settings) == [[2, True, True]], settings
END
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 "$folder/venv/bin/python" compile.py 2> errors || { cat errors; exit 1; }
