#!/usr/bin/env python3
"""Time how fast processes read layers of Wan 14B from files in memory: as published, float32, and converted.

The processes form one emulated slice of eight devices, and each reads the shards of its own devices. The script prints,
for the best run, the bytes that each process read, its GB per second, and its memory relative to its shards.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
DEVICES = 8


def main() -> None:
    """Make the checkpoint, convert it, and measure one process and four at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3, help="1.4 GB each as published; default %(default)s")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="in memory; default %(default)s")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # checkpoint, rank, processes, coordinator
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], int(args.measure[1]), int(args.measure[2]), args.measure[3])
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        published, converted = f"{folder}/published", f"{folder}/converted"
        subprocess.run([sys.executable, "-c", MAKE, published, str(args.layers)], check=True, cwd=ROOT)
        start = time.perf_counter()
        command = [sys.executable, "-m", "actors.cli", "weights", "convert", published, converted]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
        print(f"converted in {time.perf_counter() - start:.1f} s")
        for name, checkpoint in (("as published", published), ("converted", converted)):
            for processes in (1, 4):
                best = max((run(checkpoint, processes) for _ in range(args.runs)), key=lambda result: result[0])
                print(
                    f"{name}, {processes} at once: {best[0]:.2f} GB/s each, {best[1]:.2f} GB read, {best[2]:.2f} GB "
                    f"of own shards, memory {best[3]:.2f} x those",
                    flush=True,
                )


MAKE = """
import sys
from pathlib import Path
from wan_tpu.families.wan.published import TRANSFORMER_14B
from wan_tpu.families.wan.small import make_checkpoint
widths = {name: TRANSFORMER_14B[name] for name in ("num_attention_heads", "attention_head_dim", "ffn_dim")}
make_checkpoint(Path(sys.argv[1]), "wan2.1-t2v-14b", transformer=widths | {"num_layers": int(sys.argv[2])})
"""


def run(checkpoint: str, processes: int) -> tuple[float, ...]:
    """Return the slowest process's GB per second, GB read, GB of shards, and memory divided by the shards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    all_of_them = [
        subprocess.Popen(
            [sys.executable, __file__, "--measure", checkpoint, str(rank), str(processes), coordinator],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(processes)
    ]
    results = [tuple(map(float, process.communicate()[0].splitlines()[-1].split())) for process in all_of_them]
    return min(results)


def kib(name: str) -> int:
    """Return a line of this process's status, KiB."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if name in line)


def touch(nbytes: int) -> None:
    """Use this much memory once: a virtual machine gets memory that was never used page by page, at 0.5 GB/s."""
    rooms = [np.empty(2**20, np.uint8) for _ in range(nbytes // 2**20)]
    for room in rooms:
        room.fill(1)


def measure(checkpoint: str, rank: int, processes: int, coordinator: str) -> None:
    """Read the transformer as one process of several; print what `run` returns."""
    import jax
    from jax.experimental import multihost_utils

    from wan_tpu.checkpoint import Checkpoint
    from wan_tpu.families.model import open_model
    from wan_tpu.progress import Silent
    from wan_tpu.runtime.components import load_component
    from wan_tpu.runtime.mesh import make_mesh

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, processes, rank)
    model, read, starts = open_model(Checkpoint(checkpoint)), list[int](), list[float]()
    mesh = make_mesh((1, 1, DEVICES), heads=model.spec.heads)

    def show(total: int) -> Silent:
        read.append(total)
        starts.append(time.perf_counter())
        return Silent()

    touch(6 * 2**30 // processes)
    if processes > 1:
        multihost_utils.sync_global_devices("start")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = kib("VmRSS")
    params = load_component(Checkpoint(checkpoint), model.components["denoise"], "bfloat16", mesh, show).params
    seconds = time.perf_counter() - starts[0]  # The clock starts after headers are read and the module is built.
    peak_bytes = 1024 * (kib("VmHWM") - before)
    weight_bytes = sum(
        sum({str(shard.index): shard.data.nbytes for shard in array.addressable_shards}.values())
        for array in params.values()
    )
    print(sum(read) / seconds / 1e9, sum(read) / 1e9, weight_bytes / 1e9, peak_bytes / weight_bytes)


if __name__ == "__main__":
    main()
