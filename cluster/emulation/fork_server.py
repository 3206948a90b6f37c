"""Start the workers of an emulated cluster as forks of one process that has imported what they compute with.

A host of a slice imports torch, JAX and diffusers, which takes four seconds of a core. That is nothing for a machine
with a TPU, but most of the work of an emulated cluster, whose hosts all start on one machine. Here it is done once. The
fork does everything else that a worker does when it starts, including Ray's own start, with the arguments, environment,
folder, streams, priority and blocked signals of the process that it stands in for. If the import would give something
else now, because the environment differs or code has changed, the fork executes a new Python instead.

Ray itself isn't imported beforehand, because its library reads a worker's job and raylet from the environment when it
is loaded.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from cluster import ray_private
from cluster.emulation import fork_client

# Prefixes of variables that JAX, torch and others read when they are imported.
_READ_AT_IMPORT = ("JAX_", "TORCH", "HF_", "TRANSFORMERS_", "DIFFUSERS_", "OMP_", "OPENBLAS_", "PYTHON", "LD_")
_WATCH = "--ends-with-stdin"


def start(path: Path, module: str, *, ends_with_caller: bool = False) -> "subprocess.Popen[bytes]":
    """Start a server that has imported a module. It runs until it is killed.

    Args:
        path: The socket on which it listens; its log is `path`.log.
        ends_with_caller: Also end it with this process, however that ends.
    """
    with socket.socket(socket.AF_UNIX) as listening, open(f"{path}.log", "wb") as log:
        listening.bind(str(path))
        listening.listen(128)  # Clients that connect during the import wait.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(listening.fileno()), module, *[_WATCH] * ends_with_caller],
            stdin=subprocess.PIPE if ends_with_caller else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )


def build_command(path: Path) -> list[str]:
    """Return what replaces Python in a worker's command, so that the server at `path` forks the worker."""
    return [sys.executable, "-IS", fork_client.__file__, str(path)]


def _serve(listening: socket.socket, module: str, *, watch: bool) -> None:
    """Fork for each client. This returns only in forks, at their end; `watch` ends the server when its stdin ends."""
    environment = _read_environment()
    _import(module)
    imported = environment | _read_change_times()
    with listening:
        connection = _fork_for_clients(listening, watch=watch)
    _become(_take_over(connection), imported)


def _import(module: str) -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(20_000)  # See host_actor.py.
    importlib.import_module(module)
    gc.set_threshold(*threshold)
    gc.collect()
    gc.freeze()  # Memory that no collection looks at stays shared by all forks.


def _read_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}


def _read_change_times() -> dict[str, str]:
    """Return when each imported file outside of installed packages was changed: a developer's files, and this one."""
    changed = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith((sys.prefix, sys.base_prefix)):
            with contextlib.suppress(FileNotFoundError):
                changed[file] = str(os.stat(file).st_mtime_ns)
    return changed


def _fork_for_clients(listening: socket.socket, *, watch: bool) -> socket.socket:
    """Fork for each client that connects, and return its connection in the fork."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Forks that end need not be waited for.
    while True:
        if watch and 0 in select.select([listening.fileno(), 0], [], [])[0]:
            sys.exit()
        connection, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, before)
            return connection
        connection.close()


def _take_over(connection: socket.socket) -> list[str]:
    """Take over the client's streams, environment and settings, confirm that, and return its arguments."""
    _, streams, _, _ = socket.recv_fds(connection, 1, len(fork_client.STREAMS))
    start = json.loads(b"".join(iter(lambda: connection.recv(65_536), b"")))
    for stream, descriptor in zip(streams, fork_client.STREAMS, strict=True):
        os.dup2(stream, descriptor)
        os.close(stream)
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["folder"])
    os.setpgrp()  # A raylet gives every worker a process group, and ends the whole group with the worker.
    os.setpriority(os.PRIO_PROCESS, 0, start["nice"])
    signal.pthread_sigmask(signal.SIG_SETMASK, start["blocked"])
    connection.sendall(b"\0")
    # The connection closes when this process ends, whatever program it executes.
    os.set_inheritable(connection.detach(), True)
    arguments: list[str] = start["arguments"]
    return arguments


def _become(arguments: list[str], imported: dict[str, str]) -> None:
    """Do what Ray's `setup_worker.py` does with these arguments, and then what the Python that it starts does."""
    context, arguments, needs_another = ray_private.read_worker_arguments(arguments[1:])
    if needs_another or _read_environment() | _read_change_times() != imported:
        ray_private.exec_worker(context, arguments)
    sys.argv[:] = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], watch=_WATCH in sys.argv)
