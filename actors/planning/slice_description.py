"""A kind of slice, from `cluster`, as `wan_tpu.aot` wants it."""

from typing import TYPE_CHECKING

from actors.planning.calibration import Calibration
from cluster.slice_spec import SliceSpec

if TYPE_CHECKING:
    from wan_tpu.aot.topology import DescribedSlice


def describe_slice(kind: SliceSpec, calibration: Calibration | None = None) -> "DescribedSlice":
    """Return the description of a slice of this kind, by published figures, or by those that were measured.

    Raises:
        InvalidInput: They were measured on another generation.
    """
    from wan_tpu.aot.topology import DescribedSlice, Hardware  # This imports JAX.

    chip = kind.chip
    sizes = [size if wraps else 0 for size, wraps in zip(kind.shape, kind.wraps, strict=True)]
    published = DescribedSlice(
        name=kind.name,
        topology=f"{chip.compiler}:{kind.topology}",
        host_bounds=(*kind.host_shape, 1)[:3],
        hardware=Hardware(
            name=chip.name,
            host_topology=chip.host_topology,
            clock_hz=chip.clock_hz,
            peak_flops=chip.bf16_flops / chip.devices,
            hbm_bytes=chip.device_bytes,
            hbm_bytes_per_s=chip.hbm_bytes_per_s / chip.devices,
        ),
        wraps=(*sizes, 0)[:3],
        link_bytes_per_s=chip.ici_link_bytes_per_s,
        core_bytes_per_s=chip.core_link_bytes_per_s or 0.0,
        cores=chip.cores // chip.devices,
    )
    return published if calibration is None else calibration.apply(published)
