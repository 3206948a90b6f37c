#!/usr/bin/env bash
# What XLA's products of integers cost on TPUs: signs that differ cost the gain, and four bits gain nothing more.
#
# Guess: on v5e, v5p and v6e int4 takes half of int8's cycles, as on other accelerators; uint8 times int8, for
# activations with a zero point, takes int8's; so does int8 times int4.
# Seen (jax 0.12.0.1, libtpu 0.0.50.1; the compiler's own estimate for 8192^3, relative to bfloat16): on each of these
# chips int4, int8, uint8 and int8 times int4 take about the same, 0.46 to 0.62. uint8 times int8 takes as much as
# bfloat16 with weights of 8 or 4 bits does, 0.86 to 1.03. On 7x all of them take 0.94 to 1.15: integers gain nothing.
#
# So quantisation with a zero point must subtract it before the product. Weights in int4 save memory, but no time.
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

ALIKE = (("int8", "int8", "int32"), ("int4", "int4", "int32"), ("int8", "int4", "int32"), ("uint8", "uint8", "uint32"))
MIXED = (("uint8", "int8", "int32"), ("bfloat16", "int8", "float32"), ("bfloat16", "int4", "float32"))


def estimate(chip, left, right, sums):
    """Return the compiler's estimate of a product's cycles."""
    sharding = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0])
    x, y = (jax.ShapeDtypeStruct((8192, 8192), jnp.dtype(name), sharding=sharding) for name in (left, right))
    product = jax.jit(lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.dtype(sums))).lower(x, y).compile()
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', product.as_text())))


for chip in ("v5e:2x2x1", "v5p:2x2x1", "v6e:2x2x1", "tpu7x:2x2x1"):
    usual = estimate(chip, "bfloat16", "bfloat16", "float32")
    alike = {" x ".join(types[:2]): round(estimate(chip, *types) / usual, 2) for types in ALIKE}
    mixed = {" x ".join(types[:2]): round(estimate(chip, *types) / usual, 2) for types in MIXED}
    print(chip, alike, mixed, flush=True)
    assert min(mixed.values()) > 0.85
    if "7x" in chip:
        assert min(alike.values()) > 0.85
    else:
        assert max(alike.values()) < 0.7
        assert max(alike.values()) - min(alike.values()) < 0.12
END
JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 "$folder/venv/bin/python" compile.py 2> errors || { cat errors; exit 1; }
