#!/usr/bin/env bash
# What of a Pallas kernel the TPU's compiler looks at to schedule the program around it, and what looking at its bundles
# costs.
#
# Guess: a kernel's body takes part in the program's schedule, since it decides how long the kernel runs; and to write
# only the last pass of it (xla_jf_dump_llo_pass_label_regex) costs the writing.
# Seen (jax 0.12.0.1, libtpu 0.0.50.1): without the body, but with its blocks, the program has the same instructions in
# the same order with the same estimated cycles: the cost that the call states and the VMEM of its blocks are all that
# counts. It compiles in about half of the CPU seconds. And to have the last bundles written takes 1.7 times the CPU seconds
# of a compilation, of which the writing is a hundredth: the compiler then packs the bundles twice more, once as if there
# were no dependences through registers and once without spills.
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
import io
import json
import re
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.extend.lowering import JaxIrContext, upstream_dialects
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mosaic.python import tpu


def kernel(x, y, out):
    total = jnp.zeros((512, 512), jnp.float32)
    for start in range(0, 2048, 256):
        product = jnp.dot(x[:, start : start + 256], y[start : start + 256], preferred_element_type=jnp.float32)
        total = total + jnp.exp(product) * jnp.tanh(product + total)
    out[...] = total.astype(out.dtype)


def function(x, y):
    left, right = pl.BlockSpec((512, 2048), lambda i, j: (i, 0)), pl.BlockSpec((2048, 512), lambda i, j: (0, j))
    cost = pl.CostEstimate(flops=2 * 2048**3, transcendentals=2048**2 * 8, bytes_accessed=3 * 2 * 2048**2)
    block = pl.BlockSpec((512, 512), lambda i, j: (i, j))
    run = pl.pallas_call(kernel, x, grid=(4, 4), in_specs=[left, right], out_specs=block, cost_estimate=cost)
    return run(jax.nn.gelu(x), y).sum(0) + run(x + 1, y)


def empty(operation):
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                empty(inner.operation)
    if operation.name != "stablehlo.custom_call":
        return
    with operation.context:
        settings = json.loads(ir.StringAttr(operation.attributes["backend_config"]).value)
    call = settings["custom_call_config"]
    del call["debug_locations"]
    context = JaxIrContext()
    context.append_dialect_registry(upstream_dialects)
    context.load_all_available_dialects()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        module = ir.Module.parse(base64.b64decode(call["body"]))
        body, *_ = module.body.operations
        for inner in reversed(list(body.regions[0].blocks[0].operations)[:-1]):
            inner.operation.erase()
        written = io.BytesIO()
        module.operation.write_bytecode(written, desired_version=0)
    call["body"] = base64.b64encode(written.getvalue()).decode()
    with operation.context:
        operation.attributes["backend_config"] = ir.StringAttr.get(json.dumps(settings))


device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2x1").devices[0]
mesh = Mesh([device], ("x",))
x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
with jax.set_mesh(mesh):
    lowered = jax.jit(function).lower(x, x)
    if sys.argv[1] == "empty":
        empty(lowered.compiler_ir().operation)
    start = time.process_time()
    text = lowered.compile().as_text()
seconds = time.process_time() - start
rows = re.findall(r"^  (?:ROOT )?%\S+ = (.*?)\(", text, re.MULTILINE)
print(json.dumps([seconds, rows, re.findall(r'"estimated_cycles":"(\d+)"', text)]))
END
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1
mkdir dump
"$folder/venv/bin/python" compile.py whole > whole 2> errors || { cat errors; exit 1; }
"$folder/venv/bin/python" compile.py empty > empty 2> errors || { cat errors; exit 1; }
LIBTPU_INIT_ARGS="--xla_jf_dump_to=$folder/dump --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^final_bundles\$" \
  "$folder/venv/bin/python" compile.py whole > written 2> errors || { cat errors; exit 1; }
du -sh dump | cut -f1
python3 - <<'END'
import json

(whole, rows, cycles), (empty, *others), (written, *_) = (json.load(open(name)) for name in ("whole", "empty", "written"))
print(f"{whole:.1f} CPU s, {empty / whole:.2f} of that without the bodies, {written / whole:.1f} times that to write bundles")
assert others == [rows, cycles], "another schedule"
assert empty < 0.75 * whole and written > 1.3 * whole
END
