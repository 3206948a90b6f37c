"""The results of checks, and the machine that is checked."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from actors.planning.calibration import Calibration, slowest
from cluster.chips import CHIPS, Chip

Verdict = Literal["ok", "info", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: "fail" where videos would be wrong or not made, "warn" where they would be slow.
        expected: The right result, where that is known.
        figures: The numbers behind it, for the bundle.
    """

    name: str
    measured: str
    verdict: Verdict = "info"
    expected: str = ""
    advice: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Machine:
    """The machine that is checked.

    Attributes:
        folder: A folder to write to, on the disk that weights go to.
        is_rehearsal: Whether CPU devices stand in for chips; sizes are small then, and kernels are interpreted.
        kind: JAX's name of a device, once it has started.
        is_slice: Whether this process is one of a slice's, which its leader started and joined.
        calibration: Measured values of the figures that plans are priced with.
    """

    folder: Path
    is_rehearsal: bool = False
    kind: str = ""
    devices: int = 0
    is_slice: bool = False
    calibration: Calibration = dataclasses.field(default_factory=Calibration)

    @property
    def chip(self) -> Chip | None:
        """The generation of its TPU; None if it has no TPU, or an unknown one."""
        return next((chip for chip in CHIPS.values() if chip.jax_kind == self.kind), None)


def merge(hosts: Sequence[Machine]) -> Machine:
    """Return the hosts of a slice as one machine, which is as fast as the slowest of them."""
    return dataclasses.replace(hosts[0], calibration=slowest([host.calibration for host in hosts]))


def compare(name: str, unit: str, value: float, peak: float | None, share: float, advice: str) -> Finding:
    """Return a finding about a rate.

    Args:
        unit: The unit of the rate.
        peak: The hardware's published rate, or None where it isn't known.
        share: The share of the peak below which something is wrong.
        advice: What to do then.
    """
    figures = {"value": value, "unit": unit, "peak": peak}
    if peak is None:
        return Finding(name, f"{value:.3g} {unit}", figures=figures)
    fine = value >= share * peak
    measured = f"{value:.3g} {unit}, {value / peak:.0%} of its peak"
    expected = f"at least {share:.0%} of {peak:.3g}"
    return Finding(name, measured, "ok" if fine else "warn", expected, "" if fine else advice, figures)
