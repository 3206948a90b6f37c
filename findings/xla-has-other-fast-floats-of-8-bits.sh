#!/usr/bin/env bash
# Which types of 8 bits XLA multiplies faster than bfloat16, by TPU generation.
#
# Guess: int8 only on v5e, v5p and v6e, which have no float8; float8 of both kinds and int8 on 7x, the newest.
# Seen (jax 0.12.0.1, libtpu 0.0.50.1; the compiler's own estimate for 8192^3): on v5e, v5p and v6e float8_e5m2 and
# float8_e4m3b11fnuz take exactly int8's cycles, 0.47 to 0.62 of bfloat16's; float8_e4m3fn, the usual one, takes 0.86 to
# 1.03. On 7x float8_e4m3fn and float8_e5m2 take 0.48, and int8 takes 1.13: it is slower than bfloat16, as is
# float8_e4m3b11fnuz.
#
# So a checkpoint in int8 or in float8_e4m3fn is fast on some generations only; float8_e5m2 is on all four.
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
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

TYPES = ("int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz")


def estimate(chip, name):
    """Return the compiler's estimate of a product's cycles."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0]
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.dtype(name), sharding=SingleDeviceSharding(device))
    sums = jnp.int32 if name == "int8" else jnp.float32
    product = jax.jit(lambda a, b: jax.lax.dot(a, b, preferred_element_type=sums)).lower(x, x).compile()
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', product.as_text())))


for chip in ("v5e:2x2x1", "v5p:2x2x1", "v6e:2x2x1", "tpu7x:2x2x1"):
    usual = estimate(chip, "bfloat16")
    ratios = {name: round(estimate(chip, name) / usual, 2) for name in TYPES}
    print(chip, ratios)
    fast = {name for name, ratio in ratios.items() if ratio < 0.7}
    assert fast == ({"float8_e4m3fn", "float8_e5m2"} if "7x" in chip else set(TYPES) - {"float8_e4m3fn"})
    assert chip != "tpu7x:2x2x1" or ratios["int8"] > 1
END
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 "$folder/venv/bin/python" compile.py 2> errors || { cat errors; exit 1; }
