"""Processes of tests that compute: forks of one that has imported torch, JAX and diffusers, which takes seconds."""

import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import jax
import pytest

from tests.conftest import ROOT, with_devices
from tests.waiting import SECONDS

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["actors.imported"])


def start_module(
    module: str,
    *arguments: object,
    environment: Mapping[str, str] = os.environ,
    output: Path | None = None,
    errors: Path | None = None,
) -> ForkServerProcess:
    """Start `python -m module arguments`.

    Args:
        module: a module that may import what it likes, and starts JAX itself
        arguments: of its command line
        environment: in place of this process's; what JAX reads when it is imported must be as it is here
        output: the file that gets what it prints
        errors: the file that gets its errors, where they don't go to `output` as well
    """
    command = [module, *map(str, arguments)]
    process = _FORKS.Process(target=_run, args=(command, dict(environment), output, errors), daemon=True)
    process.start()
    return process


def run_module(
    module: str, *arguments: object, environment: Mapping[str, str] = os.environ, output: Path | None = None
) -> None:
    """Do as `start_module` does, and wait. Fails the test where the module fails."""
    process = start_module(module, *arguments, environment=environment, output=output)
    process.join(SECONDS)
    process.kill()
    assert process.exitcode == 0, f"{module} ended with {process.exitcode}"


def run_command(*arguments: object, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """Run `wan-tpu arguments`, without the seconds that its imports take; return its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start_module("actors.cli", *arguments, environment=environment, output=output, errors=errors)
        process.join(SECONDS)
        process.kill()
        process.join()
        assert process.exitcode is not None
        texts = output.read_text(), errors.read_text()
    return subprocess.CompletedProcess(["wan-tpu", *map(str, arguments)], process.exitcode, *texts)


def run_on_devices(module: str, *arguments: object, count: int) -> None:
    """Do as `run_module` does, with that many virtual CPU devices.

    With WAN_TPU_TEST_PLATFORMS (`make test-tpu`) the module runs on all devices of the machine, in this process, since
    no other one could have them. The test is skipped where there is only one.
    """
    if "WAN_TPU_TEST_PLATFORMS" not in os.environ:
        run_module(module, *arguments, environment=with_devices(count))
        return
    if jax.device_count() == 1:
        pytest.skip(f"needs several devices; this machine has one, {jax.devices()[0]}")
    with pytest.MonkeyPatch.context() as patch, jax.default_matmul_precision("highest"):  # as CPUs multiply float32
        patch.setattr("sys.argv", [module, *map(str, arguments)])
        source = importlib.util.find_spec(module)
        assert source is not None and source.origin is not None
        runpy.run_path(source.origin, run_name="__main__")


def _run(command: list[str], environment: dict[str, str], output: Path | None, errors: Path | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    if output is not None:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    if errors is not None:
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 2)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
