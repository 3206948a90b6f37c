"""Check that programs compiled ahead of time are used, whether compiled here or on a machine without chips."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from actors.doctor.finding import Finding, Machine
from actors.planning.slice_description import describe_slice
from cluster.slice_spec import SliceSpec, name_slice
from wan_tpu.aot.executables import Executables
from wan_tpu.runtime.mesh import AXES, replicated_sharding
from wan_tpu.runtime.program import Program, place

COMPILE_S = 300.0  # Limit for a small program; most of the time goes into starting a process and the compiler.
_LOG = "wan_tpu.aot.executables"
_ADVICE = "every start compiles again, which takes minutes: give both machines the same packages and flags"


def check_executables(machine: Machine) -> Iterator[Finding]:
    """Yield whether stored programs are loaded, or why not: one of this process, and one made without chips."""
    compile_to(machine.folder / "here")
    yield load("compiled here", machine.folder / "here")
    # Devices of a described slice are numbered from 0: only where one host has them all are this process's the same.
    if machine.chip is not None and jax.process_count() == 1:
        folder = machine.folder / "elsewhere"
        kind = name_slice(machine.chip, machine.devices // machine.chip.devices)
        yield load("compiled without chips", folder, _compile_elsewhere(folder, kind))


def compile_to(folder: Path, kind: str = "") -> None:
    """Compile and store the program: for a described slice if `kind` is given, otherwise for this machine's devices."""
    mesh = _make_mesh(describe_slice(SliceSpec(kind)).devices() if kind else jax.local_devices())
    x = jax.ShapeDtypeStruct((8, 128), np.float32, sharding=replicated_sharding(mesh))
    _make_program(folder, mesh, save=True).compile(x)


def _compile_elsewhere(folder: Path, kind: str) -> str:
    """Have another process, which has no chips, compile the program; return its message if that fails."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", __name__, str(folder), kind]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=COMPILE_S)
    except subprocess.TimeoutExpired:
        return f"it took longer than {COMPILE_S:g} s"
    lines = done.stderr.strip().splitlines() or ["no message"]
    return "" if done.returncode == 0 else lines[-1]


def load(name: str, folder: Path, failure: str = "") -> Finding:
    """Return whether the program in a folder is used; `failure` says why another process couldn't make it."""
    if failure:
        return Finding(name, f"it could not be made: {failure}", "fail", "a file", "attach this report to an issue")
    mesh, reasons = _make_mesh(jax.local_devices()), _Reasons()
    logging.getLogger(_LOG).addHandler(reasons)
    try:
        program = _make_program(folder, mesh, save=False)
        result = np.asarray(program(place(np.ones((8, 128), np.float32), mesh)))
    finally:
        logging.getLogger(_LOG).removeHandler(reasons)
    right = bool((result == 129).all())
    used = program.compile_s == 0
    return Finding(
        name,
        "used" if used and right else "used, with a wrong result" if used else f"not used: {'; '.join(reasons.lines)}",
        "ok" if used and right else "fail",
        "used",
        "" if used and right else _ADVICE,
    )


def _make_mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices[:1]).reshape(1, 1, 1), AXES)


def _make_program(folder: Path, mesh: Mesh, *, save: bool) -> Program:
    stored = Executables(folder, "doctor", save=save)
    return Program(lambda x: x @ x.T @ x / x.shape[0] + 1, mesh, exact=True, name="doctor", executables=stored)


class _Reasons(logging.Handler):
    """Keeps why a stored program isn't used."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason that a line of the log states, if it states one."""
        if reason := record.__dict__.get("reason"):
            self.lines.append(reason)


if __name__ == "__main__":
    compile_to(Path(sys.argv[1]), sys.argv[2])
