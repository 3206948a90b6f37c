"""The TPU generations: what one chip has, and what Ray, GKE and the TPU compiler call it.

Sources, fetched in 2026:
[v5e]   docs.cloud.google.com/tpu/docs/v5e
[v5p]   docs.cloud.google.com/tpu/docs/v5p
[v6e]   docs.cloud.google.com/tpu/docs/v6e
[tpu7x] docs.cloud.google.com/tpu/docs/tpu7x, whose table also has v5p and v6e
[GKE]   docs.cloud.google.com/kubernetes-engine/docs/concepts/tpus
[Ray]   ray.util.accelerators and ray._private.accelerators.tpu, Ray 2.60
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One TPU generation; figures are of a whole chip.

    devices               JAX devices a chip: its two cores appear as one on v5p, as two on v7x
    cores                 TensorCores a chip
    usable_gib            memory that programs may use, as libtpu's compiler says when it refuses one (0.0.50.1)
    hbm_bytes_per_s       its bandwidth
    bf16_flops            dense peak a second (a multiply-add is two)
    clock_hz              of the TensorCore: one VLIW bundle a cycle
    ici_link_bytes_per_s  of one link in one direction; two an axis of the torus leave a chip
    core_link_bytes_per_s between the two devices of a chip, one direction; None where a chip is one device
    chips_per_host        in a slice of several hosts; one_host_chips: the sizes that a single host can have
    """

    name: str
    devices: int
    cores: int
    usable_gib: float
    hbm_bytes_per_s: float
    bf16_flops: float
    clock_hz: float
    ici_link_bytes_per_s: float
    core_link_bytes_per_s: float | None
    chips_per_host: int
    one_host_chips: tuple[int, ...]
    gke_accelerator: str
    ray_accelerator: str
    compiler: str


V5E = Chip(
    name="v5e",
    devices=1,
    cores=1,
    usable_gib=15.75,
    hbm_bytes_per_s=819e9,  # [v5e]
    bf16_flops=197e12,  # [v5e]
    clock_hz=1.5e9,  # 197e12 / (4 MXUs of 128 x 128 x 2 operations a cycle [v5e])
    ici_link_bytes_per_s=50e9,  # 400 GB/s a chip, both directions, over 4 ports [v5e]
    core_link_bytes_per_s=None,
    chips_per_host=4,  # multi-host slices are of 4-chip VMs [v5e]
    one_host_chips=(1, 4, 8),  # [v5e]
    gke_accelerator="tpu-v5-lite-podslice",  # [GKE]
    ray_accelerator="TPU-V5LITEPOD",  # [Ray]
    compiler="v5e",
)
V5P = Chip(
    name="v5p",
    devices=1,
    cores=2,
    usable_gib=95.73,
    hbm_bytes_per_s=2765e9,  # [tpu7x]
    bf16_flops=459e12,  # [tpu7x]
    clock_hz=1.75e9,  # 459e12 / (2 cores x 4 MXUs of 128 x 128 x 2 operations a cycle [v5p])
    ici_link_bytes_per_s=100e9,  # 1200 GB/s a chip, both directions, over the 6 ports of a 3D torus [tpu7x]
    core_link_bytes_per_s=None,
    chips_per_host=4,  # [v5p]
    one_host_chips=(4,),
    gke_accelerator="tpu-v5p-slice",  # [GKE]
    ray_accelerator="TPU-V5P",  # [Ray]
    compiler="v5p",
)
V6E = Chip(
    name="v6e",
    devices=1,
    cores=1,
    usable_gib=31.24,
    hbm_bytes_per_s=1638e9,  # [tpu7x]
    bf16_flops=918e12,  # [v6e]
    clock_hz=1.75e9,  # 918e12 / (4 x 256 x 256 x 2 operations a cycle): its 2 MXUs [v6e] take two passes a cycle
    ici_link_bytes_per_s=100e9,  # 800 GB/s a chip, both directions [tpu7x], over 4 ports [v6e]
    core_link_bytes_per_s=None,
    chips_per_host=4,  # multi-host slices are of 4-chip VMs [v6e]
    one_host_chips=(1, 4, 8),  # [v6e]
    gke_accelerator="tpu-v6e-slice",  # [GKE]
    ray_accelerator="TPU-V6E",  # [Ray]
    compiler="v6e",
)
V7X = Chip(
    name="v7x",
    devices=2,
    cores=2,
    usable_gib=2 * 94.74,
    hbm_bytes_per_s=7380e9,  # [tpu7x]
    bf16_flops=2307e12,  # [tpu7x]
    clock_hz=2.2e9,  # 2307e12 / (2 cores x 4 x 256 x 256 x 2 operations a cycle), as v6e's cores
    ici_link_bytes_per_s=100e9,  # 1200 GB/s a chip, both directions, over the 6 ports of a 3D torus [tpu7x]
    core_link_bytes_per_s=600e9,  # "six times faster than a 1D ICI link" [tpu7x]
    chips_per_host=4,  # [tpu7x]
    one_host_chips=(1, 4),
    gke_accelerator="tpu7x",  # [GKE]
    ray_accelerator="TPU-V7X",  # [Ray]
    compiler="tpu7x",
)
CHIPS = {chip.name: chip for chip in (V5E, V5P, V6E, V7X)}
