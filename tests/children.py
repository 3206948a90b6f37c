"""Child processes for tests, forked from one that has imported torch, JAX and diffusers, because that takes seconds."""

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import resource
import runpy
import signal
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
LIMIT_S = 2 * SECONDS  # Tests that compute have a low priority, and so have their processes.


def start_module(
    module: str,
    *arguments: object,
    environment: Mapping[str, str] = os.environ,
    output: Path | None = None,
    errors: Path | None = None,
) -> ForkServerProcess:
    """Start `python -m module arguments`.

    Args:
        module: The module. It may import anything, and initialises JAX itself.
        arguments: Its command line's arguments.
        environment: Replaces this process's environment. Variables that JAX reads when it is imported must be the same
            as here.
        output: The file for its standard output.
        errors: The file for its standard error; None to write both to `output`.
    """
    command = [module, *map(str, arguments)]
    process = _FORKS.Process(target=_run, args=(command, dict(environment), output, errors), daemon=True)
    process.start()
    return process


def end(process: ForkServerProcess) -> None:
    """End a child; one that still runs writes first where each of its threads is."""
    if process.exitcode is None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
        process.join(10)
    process.kill()
    process.join()


def run_module(
    module: str, *arguments: object, environment: Mapping[str, str] = os.environ, output: Path | None = None
) -> None:
    """Run a module as `start_module` does, and wait for its end. If the module fails, so does the test."""
    process = start_module(module, *arguments, environment=environment, output=output)
    process.join(LIMIT_S)
    end(process)
    assert process.exitcode == 0, f"{module} ended with {process.exitcode}"


def run_command(*arguments: object, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """Run `wan-tpu arguments` without waiting seconds for its imports; return its exit code and its output."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start_module("actors.cli", *arguments, environment=environment, output=output, errors=errors)
        process.join(LIMIT_S)
        end(process)
        texts = output.read_text(), errors.read_text()
    return subprocess.CompletedProcess(["wan-tpu", *map(str, arguments)], process.exitcode, *texts)


def run_on_devices(module: str, *arguments: object, count: int) -> None:
    """Run a module as `run_module` does, with that many virtual CPU devices.

    With WAN_TPU_TEST_PLATFORMS (`make test-tpu`) the module runs on all devices of the machine. It then runs in this
    process, because only one process can use them. With a single device, the test is skipped.
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
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # `end` aborts what hangs.
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
