"""Switches that leave out what is written by hand or overlapped, to find the piece that is wrong on a chip.

They are environment variables: they hold for a whole process, on each host of a slice, are read when a program is
traced, and are part of what a stored executable was made from (`wan_tpu.aot.key`).
"""

import os

from wan_tpu.errors import InvalidInput
from wan_tpu.suggest import did_you_mean

KERNELS, COLLECTIVES = "WAN_TPU_KERNELS", "WAN_TPU_COLLECTIVES"
OWN, REFERENCE = "own", "reference"
OVERLAPPED, SYNCHRONOUS = "overlapped", "synchronous"
# The pieces that have a plain twin, by the names that --kernels takes.
NAMES = (
    "attention",
    "sparse_attention",
    "linear",
    "layer_norm",
    "round_rows",
    "rms_norm_rope",
    "head_norm_rope",
    "causal_conv",
    "channel_moments",
    "norm_silu",
)
KERNELS_FORM = f"{OWN}, {REFERENCE}, or {REFERENCE}:NAME,NAME of {', '.join(NAMES)}"


def set_switches(kernels: str | None = None, collectives: str | None = None) -> None:
    """Set the switches of this process, before its programs are traced; None leaves one as it is.

    Args:
        kernels: "own", "reference" for plain operations in place of all kernels, or "reference:linear,attention"
        collectives: "overlapped", or "synchronous": whatever is sent has arrived before anything else is computed

    Raises:
        InvalidInput: for anything else.
    """
    if kernels is not None:
        _left_out(kernels)
        os.environ[KERNELS] = kernels
    if collectives is not None:
        if collectives not in (OVERLAPPED, SYNCHRONOUS):
            raise InvalidInput(f"--collectives is {collectives!r}; give {OVERLAPPED} or {SYNCHRONOUS}")
        os.environ[COLLECTIVES] = collectives


def switches() -> dict[str, str]:
    """Return the switches as they are, by their names on the command line."""
    return {"kernels": os.environ.get(KERNELS, OWN), "collectives": os.environ.get(COLLECTIVES, OVERLAPPED)}


def uses_kernel(name: str, platform: str) -> bool:
    """Return whether an operation is our kernel's: on a TPU, where it isn't switched off."""
    return platform == "tpu" and name not in _left_out(switches()["kernels"])


def is_synchronous() -> bool:
    """Return whether nothing is computed while something is sent."""
    return switches()["collectives"] == SYNCHRONOUS


def _left_out(kernels: str) -> frozenset[str]:
    """Return the kernels that are switched off; raises `InvalidInput`."""
    if kernels == OWN:
        return frozenset()
    kind, colon, names = kernels.partition(":")
    listed = frozenset(names.split(",")) if colon else frozenset(NAMES)
    if kind != REFERENCE:
        raise InvalidInput(f"--kernels is {kernels!r}; give {KERNELS_FORM}")
    if unknown := sorted(listed - set(NAMES)):
        raise InvalidInput(f"there is no kernel {unknown[0]!r}{did_you_mean(unknown[0], NAMES)}; give {KERNELS_FORM}")
    return listed
