"""A kind of slice, from `cluster`, as `wan_tpu.aot` wants it; and how the scripts that use it end."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from cluster.chips import GIB
from cluster.errors import ClusterError
from cluster.slice_spec import SliceSpec
from wan_tpu.errors import WanTpuError

if TYPE_CHECKING:
    from wan_tpu.aot.topology import DescribedSlice


def run(main: Callable[[], int | None]) -> NoReturn:
    """End with what `main` returns; what is raised on purpose, and Ctrl-C, are one line."""
    try:
        sys.exit(main() or 0)
    except (ClusterError, WanTpuError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def described(kind: SliceSpec) -> "DescribedSlice":
    """Return the description of a slice of this kind."""
    from wan_tpu.aot.topology import DescribedSlice, Hardware  # brings JAX

    chip = kind.chip
    sizes = [size if wraps else 0 for size, wraps in zip(kind.shape, kind.wraps, strict=True)]
    return DescribedSlice(
        name=kind.name,
        topology=f"{chip.compiler}:{kind.topology}",
        host_bounds=_three(kind.host_shape, 1),
        hardware=Hardware(
            name=chip.name,
            clock_hz=chip.clock_hz,
            peak_flops=chip.bf16_flops / chip.devices,
            hbm_bytes=chip.usable_gib * GIB / chip.devices,
            hbm_bytes_per_s=chip.hbm_bytes_per_s / chip.devices,
        ),
        wraps=_three(sizes, 0),
        link_bytes_per_s=chip.ici_link_bytes_per_s,
        core_bytes_per_s=chip.core_link_bytes_per_s or 0.0,
        cores=chip.cores // chip.devices,
    )


def _three(sizes: tuple[int, ...] | list[int], filler: int) -> tuple[int, int, int]:
    x, y, z = [*sizes, filler, filler][:3]
    return x, y, z
