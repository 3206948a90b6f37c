#!/usr/bin/env python3
"""Compile a published model's full-size denoise step for a described TPU slice: does it fit, how long does it take?

Needs libtpu (`pip install ".[aot]"`), which holds the whole TPU compiler, but no TPU and no weights.
"""

import argparse
import os
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ |= {"TPU_ACCELERATOR_TYPE": "v6e-8", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from wan_tpu import GenerationRequest
from wan_tpu.checkpoint import abstract_component
from wan_tpu.families.wan import TEXT_TOKENS, WanModel
from wan_tpu.families.wan_presets import PRESETS
from wan_tpu.mesh import make_mesh, replicated
from wan_tpu.request import parse_size
from wan_tpu.runtime import Runtime
from wan_tpu.solvers import solver_table
from wan_tpu.stages import step_numbers, step_program

# One host each. v6e-8 is one host of 2x4 chips; its topology is two hosts unless told.
SLICES = {
    "v6e-4": ("v6e:2x2", None),
    "v6e-8": ("v6e:2x4", (2, 4, 1)),
    "v5p-8": ("v5p:2x2x1", None),
}
GIB = 2**30


def main() -> None:
    """Print mesh, compile seconds and GiB a chip."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="wan2.2-i2v-a14b")
    parser.add_argument("--slice", choices=SLICES, default="v6e-8")
    parser.add_argument("--size", default="720*1280")
    parser.add_argument("--frames", type=int, default=81)
    for axis in ("dp", "sp", "tp"):
        parser.add_argument(f"--{axis}", type=int)
    args = parser.parse_args()

    name, hosts = SLICES[args.slice]
    bounds = {} if hosts is None else {"chips_per_host_bounds": hosts}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices
    model = WanModel(PRESETS[args.model])
    height, width = parse_size(args.size)
    request = GenerationRequest(height=height, width=width, frames=args.frames).resolve(model.defaults)
    mesh = make_mesh((args.dp, args.sp, args.tp), heads=model.heads, devices=devices)
    loaded = abstract_component(model.components["denoise_high"], "bfloat16", mesh)

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))

    shape = model.latent_shape(request)
    table = solver_table("unipc", request.steps, request.shift)
    numbers = {key: array(*value.shape) for key, value in step_numbers(table, 0, 1.0).items()}
    config = model.config.transformer
    image = array(1, 257, config["image_dim"], dtype=jnp.bfloat16) if model.needs_image_features else None
    extra = config["in_channels"] - shape[1]
    given = (
        array(2, TEXT_TOKENS, config["text_dim"], dtype=jnp.bfloat16),
        image,
        array(1, extra, *shape[2:]) if extra else None,
    )
    program = step_program(Runtime(model, mesh, "bfloat16", keep_weights=True), loaded.module)
    start = time.perf_counter()
    compiled = program.compile(loaded.params, array(*shape), (array(*shape),) * table.history_terms, numbers, given)
    memory = compiled.memory_analysis()
    weights, temporaries = memory.argument_size_in_bytes / GIB, memory.temp_size_in_bytes / GIB
    print(f"{args.model}, {args.size}, {args.frames} frames, {model.tokens(shape)} tokens, guided, bfloat16")
    print(f"{args.slice}, mesh {dict(mesh.shape)}: compiled in {time.perf_counter() - start:.0f} s")
    print(f"{weights + temporaries:.1f} GiB a chip: {weights:.1f} arguments, {temporaries:.1f} temporaries")


if __name__ == "__main__":
    main()
