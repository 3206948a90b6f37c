"""The device files of TPU chips, which show whether this machine has a TPU even if JAX can't use it."""

import glob


def chip_files() -> list[str]:
    """Return this machine's chip files: newer generations appear in /dev/vfio, older ones as /dev/accel0 and so on."""
    return sorted(glob.glob("/dev/vfio/[0-9]*") + glob.glob("/dev/accel*"))
