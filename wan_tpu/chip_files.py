"""The device files of a TPU's chips: whether this machine has one, whatever JAX says."""

import glob


def chip_files() -> list[str]:
    """Return the files of this machine's chips: of newer generations in vfio, of older ones accel0 and so on."""
    return sorted(glob.glob("/dev/vfio/[0-9]*") + glob.glob("/dev/accel*"))
