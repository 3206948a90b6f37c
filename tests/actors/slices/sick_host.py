"""A simulated host whose requests fail, or hang, while "sick-PID" or "hung-PID" lies beside its plan."""

import itertools
import os
import time
from pathlib import Path

from scripts.simulation.simulated import SimulatedHost
from wan_tpu.errors import DoesNotFit
from wan_tpu.storage.base import outage_s


class SickHost(SimulatedHost):
    def __init__(self, checkpoint, *args):
        super().__init__(checkpoint, *args)
        self._sick, self._hung = (Path(checkpoint).with_name(f"{how}-{os.getpid()}") for how in ("sick", "hung"))

        self._ways = itertools.cycle(["a step", "memory", "inputs"])  # in which one after the other fails
        self._way = {}

    def software(self):
        """Return a setting that this process has from its leader, where the status shows it."""
        return {"outage_s": f"{outage_s():g}"}

    def prepare_denoise(self, key, *args):
        self._way[key] = next(self._ways) if self._sick.exists() else None
        if self._way[key] == "inputs":
            raise OSError("a disk says no")
        return super().prepare_denoise(key, *args)

    def step(self, key):
        if self._way[key] == "memory":
            raise DoesNotFit("there was room before")
        if self._sick.exists():
            raise RuntimeError("a driver of the chip says no")
        while self._hung.exists():
            time.sleep(0.1)
        return super().step(key)
