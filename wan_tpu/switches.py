"""Switches that disable hand-written kernels or overlapped transfers, to find out which piece misbehaves on a chip.

They are environment variables: they hold for a whole process, on each host of a slice, and are read when a program is
traced. Stored executables depend on them (`wan_tpu.aot.key`).
"""

import os

from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean

KERNELS, COLLECTIVES = "WAN_TPU_KERNELS", "WAN_TPU_COLLECTIVES"
OWN_KERNELS, REFERENCE = "own", "reference"
OVERLAPPED, SYNCHRONOUS = "overlapped", "synchronous"


def set_switches(kernels: str | None = None, collectives: str | None = None) -> None:
    """Set the switches of this process, before its programs are traced; None leaves one as it is.

    Args:
        kernels: "own", "reference" for plain operations instead of all kernels, or "reference:linear,attention".
        collectives: "overlapped", or "synchronous" to compute nothing until a transfer has arrived.

    Raises:
        InvalidInput: A value is none of these.
    """
    if kernels is not None:
        _switched_off(kernels)  # Raises for an unknown kernel.
        os.environ[KERNELS] = kernels
    if collectives is not None:
        if collectives not in (OVERLAPPED, SYNCHRONOUS):
            raise InvalidInput(f"--collectives is {collectives!r}; give {OVERLAPPED} or {SYNCHRONOUS}")
        os.environ[COLLECTIVES] = collectives


def read_switches() -> dict[str, str]:
    """Return the current switches, by their names on the command line."""
    return {"kernels": os.environ.get(KERNELS, OWN_KERNELS), "collectives": os.environ.get(COLLECTIVES, OVERLAPPED)}


def uses_kernel(name: str, platform: str) -> bool:
    """Return whether an operation uses our kernel: on a TPU, unless the kernel is switched off."""
    return platform == "tpu" and name not in _switched_off(read_switches()["kernels"])


def is_synchronous() -> bool:
    """Return whether nothing is computed during transfers."""
    return read_switches()["collectives"] == SYNCHRONOUS


def _switched_off(kernels: str) -> frozenset[str]:
    """Return the kernels that are switched off; raises `InvalidInput`."""
    if kernels == OWN_KERNELS:
        return frozenset()
    from wan_tpu_kernels import catalogue  # It imports JAX.

    known = tuple(catalogue.KERNELS)
    kind, colon, names = kernels.partition(":")
    switches = frozenset(names.split(",")) if colon else frozenset(known)
    form = f"{OWN_KERNELS}, {REFERENCE}, or {REFERENCE}:NAME,NAME of {', '.join(known)}"
    if kind != REFERENCE:
        raise InvalidInput(f"--kernels is {kernels!r}; give {form}")
    if unknown := sorted(switches - set(known)):
        raise InvalidInput(f"there is no kernel {unknown[0]!r}{did_you_mean(unknown[0], known)}; give {form}")
    return switches
