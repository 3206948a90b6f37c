"""Run the doctor on all hosts of a slice at the same time, since some checks exchange data between them."""

import shutil
import tempfile
from pathlib import Path

from actors.doctor.examination import Part, examine_part
from actors.doctor.finding import Machine
from actors.planning.calibration import Calibration
from cluster.gang.devices import list_device_files
from wan_tpu.errors import OutputError


class DoctorHost:
    """The object that runs on each host of the slice."""

    def __init__(self, folder: str | None) -> None:
        """Write to `folder`, which should be on the disk of the weights; by default to a temporary folder."""
        if folder is not None and not Path(folder).is_dir():
            raise OutputError(f"{folder} isn't a folder on this host; create it there, or choose another --disk")
        scratch = Path(tempfile.mkdtemp(prefix="wan-tpu-doctor-", dir=folder))
        self._machine = Machine(scratch, is_rehearsal=not list_device_files(), is_slice=True)

    def check(self, part: str, calibration: Calibration) -> tuple[Part, Machine]:
        """Check one part, as all hosts do in the same order; `calibration` has their earlier measurements."""
        self._machine.calibration = calibration
        return examine_part(part, self._machine), self._machine

    def end(self) -> None:
        shutil.rmtree(self._machine.folder, ignore_errors=True)
