"""A chip's figures as `wan-tpu doctor` measured them, which replace the published ones in plans."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan_tpu.errors import InvalidInput

if TYPE_CHECKING:
    from wan_tpu.aot.topology import DescribedSlice

# By figure: its name for people, its unit, and how many of the figure's own units that is.
FIGURES = {
    "clock_hz": ("clock", "GHz", 1e9),
    "grid_step_s": ("grid step, beyond its bundles", "us", 1e-6),
    "hbm_bytes_per_s": ("device memory", "GB/s", 1e9),
    "link_bytes_per_s": ("link between chips", "GB/s", 1e9),
    "core_bytes_per_s": ("link within a chip", "GB/s", 1e9),
}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured figures. A figure that is None was not measured, and keeps its published value."""

    clock_hz: float | None = None
    # The time of a kernel's grid step beyond its bundles, of which nothing is published.
    grid_step_s: float | None = None
    hbm_bytes_per_s: float | None = None  # The memory bandwidth of one JAX device.
    link_bytes_per_s: float | None = None  # The bandwidth of a link between chips, in one direction.
    core_bytes_per_s: float | None = None  # The bandwidth between the two devices of a chip, in one direction.
    chip: str = ""  # The generation that was measured.
    source: str = ""  # The file and date of the report, for people.

    @property
    def figures(self) -> dict[str, float]:
        """What was measured, by the names of `FIGURES`."""
        return {name: value for name in FIGURES if (value := getattr(self, name)) is not None}

    def only(self, name: str) -> "Calibration":
        """Return the calibration with one of its figures; the others keep their published values."""
        unset: dict[str, Any] = dict.fromkeys(set(FIGURES) - {name})
        return dataclasses.replace(self, **unset)

    def apply(self, slice_: "DescribedSlice") -> "DescribedSlice":
        """Return a slice with the measured figures, from which it is priced.

        Raises:
            InvalidInput: The slice is of another generation.
        """
        hardware = slice_.hardware
        if self.chip != hardware.name:
            raise InvalidInput(
                f"{self.source or 'the calibration'} was measured on {self.chip}, and {slice_.name} has "
                f"{hardware.name}; run wan-tpu doctor on a {hardware.name}, or plan for a slice of {self.chip}"
            )
        figures: dict[str, Any] = dict(self.figures)
        # The matrix units do as much in a cycle as before, so that their peak goes with the clock.
        peak = hardware.peak_flops * figures.get("clock_hz", hardware.clock_hz) / hardware.clock_hz
        of_links = {name: figures.pop(name) for name in ("link_bytes_per_s", "core_bytes_per_s") if name in figures}
        hardware = dataclasses.replace(hardware, peak_flops=peak, **figures)
        return dataclasses.replace(
            slice_, hardware=hardware, calibrated=self._describe(slice_) if self.source else "", **of_links
        )

    def _describe(self, slice_: "DescribedSlice") -> str:
        """Return which figures are replaced, and by what."""
        published = vars(slice_) | vars(slice_.hardware)
        lines = [f"measured ({self.source}):"]
        for name, value in self.figures.items():
            subject, unit, scale = FIGURES[name]
            before = f"{published[name] / scale:.4g}" if published[name] else "nothing"
            lines.append(f"  {subject}: {value / scale:.4g} {unit} in place of {before}")
        unmeasured = [
            subject for name, (subject, _, _) in FIGURES.items() if name not in self.figures and published[name]
        ]
        if unmeasured:
            lines.append(f"  as published: {', '.join(unmeasured)}")
        return "\n".join(lines)


def slowest(calibrations: Sequence[Calibration]) -> Calibration:
    """Return the calibration of hosts that wait for each other: for each figure, that of the slowest host."""
    worst: dict[str, Any] = {}
    for name in FIGURES:
        values = [calibration.figures[name] for calibration in calibrations if name in calibration.figures]
        if values:
            worst[name] = max(values) if name == "grid_step_s" else min(values)
    return dataclasses.replace(calibrations[0], **worst)


def load_calibration(path: Path) -> Calibration:
    """Return the measurements of a report of `wan-tpu doctor`; raises `InvalidInput` if it can't be used."""
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"--calibration {path} can't be read: {error.strerror}") from None
    except ValueError:
        raise InvalidInput(f"--calibration {path} is damaged: it isn't JSON; {_AGAIN}") from None
    if not isinstance(report, dict) or "wan_tpu_doctor" not in report:
        raise InvalidInput(f"--calibration {path} isn't a report of wan-tpu doctor; {_AGAIN}")
    devices, measured = report.get("devices"), report.get("calibration")
    if not isinstance(devices, dict) or not isinstance(measured, dict):
        raise InvalidInput(f"--calibration {path} is damaged, or of an earlier wan-tpu: it has no figures; {_AGAIN}")
    if devices.get("rehearsal") or not devices.get("chip"):
        kind = devices.get("kind") or "no device"
        raise InvalidInput(f"--calibration {path} was measured on {kind}, which says nothing about a TPU; {_AGAIN}")
    if not measured:
        raise InvalidInput(
            f"--calibration {path} has no measured rates, because that part of the doctor didn't run; {_AGAIN}"
        )
    for name, value in measured.items():
        if name not in FIGURES or not _is_rate(name, value):
            raise InvalidInput(f"--calibration {path} is damaged: {name} is {value!r}; {_AGAIN}")
    return Calibration(
        **measured, chip=str(devices["chip"]), source=f"{path}, {devices['chip']}, {report.get('date', 'no date')}"
    )


_AGAIN = "give the doctor.json of a TPU: wan-tpu doctor --part rates --part collectives"


def _is_rate(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value >= 0 if name == "grid_step_s" else value > 0
