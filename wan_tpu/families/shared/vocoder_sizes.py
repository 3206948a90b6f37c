"""The sizes of a vocoder's layers: whether our operations support them, and how far a sample depends on its signal."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from wan_tpu.errors import CheckpointError
from wan_tpu.families.shared.vocoder import RATIO

_ENDS = 3  # Rows on each side that the first and the last convolution reach: they have seven taps.


class SizeKeys(NamedTuple):
    """The keys of a configuration that hold the sizes of a vocoder's layers.

    Attributes:
        block_taps: Taps of each residual block of a stage.
        dilations: Dilations of each block's layers.
        factors: How many times each stage raises the rate.
        taps: Taps of the transposed convolution that raises it.
    """

    block_taps: str
    dilations: str
    factors: str
    taps: str


def check_sizes(file: str, settings: Mapping[str, Any], keys: SizeKeys) -> None:
    """Raise `CheckpointError` for sizes that `run_blocks` or `convolve_transposed` don't compute."""
    dilations, block_taps = settings[keys.dilations], settings[keys.block_taps]
    if len({len(row) for row in dilations}) != 1 or not all(size % 2 for size in block_taps):
        raise CheckpointError(
            f"{file} has {keys.dilations} {dilations} and {keys.block_taps} {block_taps}; "
            "supported: the same number of dilations in each block, and odd kernel sizes"
        )
    for taps, factor in zip(settings[keys.taps], settings[keys.factors], strict=True):
        if taps < factor or (taps - factor) % 2:
            raise CheckpointError(
                f"{file} has an upsampling by {factor} with {taps} taps; supported: as many taps, or 2, 4, ... more"
            )


def measure_reach(settings: Mapping[str, Any], keys: SizeKeys, filter_taps: int) -> float:
    """Return how many rows on each side a sample depends on.

    Args:
        settings: The configuration.
        keys: Its keys of sizes.
        filter_taps: Taps of the filters around an activation; 0 if it isn't antialiased.
    """
    activation = filter_taps // RATIO
    sizes = zip(settings[keys.block_taps], settings[keys.dilations], strict=True)
    block = max(sum((taps // 2) * (1 + d) + 2 * activation for d in dilations) for taps, dilations in sizes)
    rate, reach = 1, float(_ENDS)
    for taps, factor in zip(settings[keys.taps], settings[keys.factors], strict=True):
        reach += taps / factor / rate
        rate *= factor
        reach += block / rate
    return reach + (activation + _ENDS) / rate
