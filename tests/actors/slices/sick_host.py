"""A simulated host whose steps fail, or hang, while "sick-PID" or "hung-PID" lies beside its plan."""

import os
import time
from pathlib import Path

from scripts.simulation.simulated import SimulatedHost


class SickHost(SimulatedHost):
    def __init__(self, checkpoint, *args):
        super().__init__(checkpoint, *args)
        self._sick, self._hung = (Path(checkpoint).with_name(f"{how}-{os.getpid()}") for how in ("sick", "hung"))

    def step(self, key):
        if self._sick.exists():
            raise RuntimeError("a driver of the chip says no")
        while self._hung.exists():
            time.sleep(0.1)
        return super().step(key)
