"""Whether this machine has TPU chips, even if JAX can't use them, and what libtpu needs to be told without."""

import glob

# Without these, libtpu asks a metadata server where it is running. The type must be a valid one; any will do.
NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8"}
COMPILES_ONLY = NO_TPU | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # Then libtpu doesn't lock the chips either.


def chip_files() -> list[str]:
    """Return this machine's chip files: newer generations appear in /dev/vfio, older ones as /dev/accel0 and so on."""
    return sorted(glob.glob("/dev/vfio/[0-9]*") + glob.glob("/dev/accel*"))
