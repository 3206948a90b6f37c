"""The table of the convolution kernel: a residual block's second convolution at each level of Wan's decoder."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wan_tpu.aot.topology import DescribedSlice
from wan_tpu.pricing.analyse import analyse
from wan_tpu.pricing.ici import interconnect_of
from wan_tpu.pricing.kernel_prices import KernelPrices, count_alone

from .conv_cases import build_causal, build_folded

# One latent frame of 1280x720 on one of eight devices, from the middle to the last level: frames, columns, rows
# (96 for 90 at the lowest level), channels, and rows that are folded into one's lanes.
LEVELS = ((1, 20, 96, 384, 1), (2, 40, 192, 384, 2), (4, 80, 384, 192, 4), (4, 160, 768, 96, 8))
TAPS = 27


@dataclasses.dataclass(frozen=True)
class ConvRow:
    """One call on one device of a chip.

    Attributes:
        chip: The generation.
        frames: The latent frames.
        columns: The columns on the device.
        rows: The rows.
        channels: The channels of input and output.
        grid: The kernel's grid.
        cycles: The cycles as `KernelPrices` counts them.
        at_peak: The cycles that the multiply-adds alone take at the chip's peak.
        hbm_cycles: The cycles that reading the operands and writing the result once takes.
        compile_cpu_s: The seconds of tracing and compiling, summed over the cores.
    """

    chip: str
    frames: int
    columns: int
    rows: int
    channels: int
    grid: tuple[int, ...]
    cycles: float
    at_peak: float
    hbm_cycles: float
    compile_cpu_s: float


def conv_table(described: DescribedSlice, folder: Path) -> Iterator[ConvRow]:
    """Yield one row per level, on one device of a slice; counted kernels are kept in `folder`."""
    hardware = described.hardware
    mesh = Mesh(np.array(described.devices()[:1]), ("device",))
    whole = NamedSharding(mesh, P())
    prices = KernelPrices(folder, hardware, described.cores, count_alone)
    for frames, columns, rows, channels, fold in LEVELS:
        sizes = (frames, columns, rows, channels)
        run, shapes = build_causal(*sizes) if fold == 1 else build_folded(*sizes, fold)
        arguments = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole) for shape in shapes]
        start = time.process_time()
        with jax.set_mesh(mesh):  # the kernel's own code sees the described chip
            text = jax.jit(run).lower(*arguments).compile().as_text() or ""
        compile_cpu_s = time.process_time() - start
        cost = analyse(text, hardware, interconnect_of(described, mesh), kernel_cycles=prices)
        [item] = [item for item in cost.items if item.kernel is not None]
        macs = TAPS * channels * channels * frames * columns * rows
        yield ConvRow(
            described.hardware.name,
            *sizes,
            grid=item.kernel.grid if item.kernel else (),
            cycles=prices(item.kernel) or 0.0 if item.kernel else 0.0,
            at_peak=2 * macs / hardware.peak_flops * hardware.clock_hz,
            hbm_cycles=item.hbm_bytes / hardware.hbm_bytes_per_s * hardware.clock_hz,
            compile_cpu_s=round(compile_cpu_s, 1),
        )
