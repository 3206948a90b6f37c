"""Starts the workers of an emulated cluster as forks of one process that has imported what they compute with.

A host of a slice imports torch, JAX and diffusers, which takes four seconds of a core: nothing to a machine with a TPU,
most of what an emulated cluster does when its hosts all start on one machine. Here it is done once. All else that a
worker does when it starts, Ray's own start included, its fork does, with the arguments, environment, folder, streams,
priority and blocked signals of the process it stands for. Where that isn't the same (the environment is another one
than at the import, code has changed since) the fork becomes that process.

Ray itself isn't imported before: its library reads a worker's job and raylet from the environment when it is loaded.
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

# Read by JAX, torch and others when they are imported.
_READ_AT_IMPORT = ("JAX_", "TORCH", "HF_", "TRANSFORMERS_", "DIFFUSERS_", "OMP_", "OPENBLAS_", "PYTHON", "LD_")
_WATCH = "--ends-with-stdin"


def start(path: Path, module: str, *, ends_with_caller: bool = False) -> "subprocess.Popen[bytes]":
    """Start a server that listens at `path` and has imported `module`; what it says is in `path`.log.

    It ends when it is killed, or with this process, however that ends, if that is asked for.
    """
    with socket.socket(socket.AF_UNIX) as listening, open(f"{path}.log", "wb") as log:
        listening.bind(str(path))
        listening.listen(128)  # who connects before all is imported waits
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(listening.fileno()), module, *[_WATCH] * ends_with_caller],
            stdin=subprocess.PIPE if ends_with_caller else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )


def command(path: Path) -> list[str]:
    """Return what stands for Python in the command of a worker that is to be a fork of the server at `path`."""
    return [sys.executable, "-IS", fork_client.__file__, str(path)]


def _serve(listening: socket.socket, module: str, *, watch: bool) -> None:
    """Fork for whoever connects; returns in forks, when they have ended. `watch` stdin, and end where that does."""
    environment = _environment()
    _import(module)
    imported = environment | _own_code()
    with listening:
        connection = _forked(listening, watch=watch)
    _become(_taken_over(connection), imported)


def _import(module: str) -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(20_000)  # see host_actor.py
    importlib.import_module(module)
    gc.set_threshold(*threshold)
    gc.collect()
    gc.freeze()  # what no collection looks at stays memory that all forks share


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}


def _own_code() -> dict[str, str]:
    """Return when each imported file that no package has installed was changed: a developer's, and this one."""
    changed = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith((sys.prefix, sys.base_prefix)):
            with contextlib.suppress(FileNotFoundError):
                changed[file] = str(os.stat(file).st_mtime_ns)
    return changed


def _forked(listening: socket.socket, *, watch: bool) -> socket.socket:
    """Fork for each that connects; returns in the forks alone."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing to wait for
    while True:
        if watch and 0 in select.select([listening.fileno(), 0], [], [])[0]:
            sys.exit()
        connection, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, before)
            return connection
        connection.close()


def _taken_over(connection: socket.socket) -> list[str]:
    """Take over all that the client has, tell it so, and return its arguments."""
    _, streams, _, _ = socket.recv_fds(connection, 1, len(fork_client.STREAMS))
    start = json.loads(b"".join(iter(lambda: connection.recv(65_536), b"")))
    for stream, own in zip(streams, fork_client.STREAMS, strict=True):
        os.dup2(stream, own)
        os.close(stream)
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["folder"])
    os.setpgrp()  # a raylet gives every worker a process group, and ends all of it with the worker
    os.setpriority(os.PRIO_PROCESS, 0, start["nice"])
    signal.pthread_sigmask(signal.SIG_SETMASK, start["blocked"])
    connection.sendall(b"\0")
    os.set_inheritable(connection.detach(), True)  # closed by the end of this process, whatever it becomes
    arguments: list[str] = start["arguments"]
    return arguments


def _become(arguments: list[str], imported: dict[str, str]) -> None:
    """Do as Ray's `setup_worker.py` does with these arguments, and as the Python that it then starts."""
    context, arguments, needs_another = ray_private.read_worker_arguments(arguments[1:])
    if needs_another or _environment() | _own_code() != imported:
        ray_private.exec_worker(context, arguments)
    sys.argv[:] = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], watch=_WATCH in sys.argv)
