"""Start the Ray nodes of an emulated cluster on this machine, and find their processes again."""

import contextlib
import functools
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cluster import ray_private
from cluster.authentication import make_token
from cluster.emulation import fork_server, haproxy
from cluster.errors import ClusterStartFailed

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_MEMORY_BYTES = 2**38  # How much memory Ray counts on each node, whatever the machine has.
FORKS = "forks"  # The socket in a cluster's folder on which its fork server listens, if it has one.

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # See connect.py.
    "RAY_enable_worker_prestart": "0",  # Idle Python processes on every node would share a few cores.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",  # Events of calls are 0.2 MB per video, which nobody reads here.
    "RAY_task_events_max_num_task_in_gcs": "100",  # Drivers still report theirs; the default is 100,000.
    "RAY_memory_monitor_refresh_ms": "0",  # Each node would see the memory of all nodes, and kill workers for it.
    "RAY_health_check_period_ms": "1000",  # A node is dead after five failures in a row: 5 s instead of Ray's 15.
    "RAY_JOB_STOP_WAIT_TIME_S": "60",  # A stopped job takes its pipeline down; by default Ray kills it after 3 s.
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True)
class NodeSettings:
    """One Ray node."""

    name: str  # The name of the node and of its folder.
    cpus: int
    object_store_bytes: int
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    # Environment variables of its processes, such as those that GKE sets on TPU hosts.
    variables: Mapping[str, str] = field(default_factory=dict)


def start_head(folder: Path, settings: NodeSettings, *, dashboard: bool) -> tuple[str, str | None]:
    """Start the GCS and the head node.

    Args:
        dashboard: Whether to start the dashboard, which accepts jobs.

    Returns:
        "host:port" of the GCS, and that of the dashboard or None.
    """
    # Serve's controller, proxies and ingresses all run on the head, so only the head needs these variables.
    haproxy_environment = haproxy.environment(folder)
    node = _start(folder, settings, None, ENVIRONMENT | haproxy_environment, dashboard=dashboard)
    return node.gcs_address, node.webui_url or None if dashboard else None


def start_host(folder: Path, settings: NodeSettings, address: str) -> str:
    """Start another node of the cluster at `address`, and return its node id. Threads may start several at once."""
    # The folder may be that of a killed host, which this one replaces.
    shutil.rmtree(folder / settings.name, ignore_errors=True)
    return _start(folder, settings, address, {**ENVIRONMENT, **settings.variables}, dashboard=False).node_id


def _start(
    folder: Path, settings: NodeSettings, address: str | None, environment: Mapping[str, str], *, dashboard: bool
) -> Any:
    """Start a node, with a second try if it doesn't come up, and return Ray's object.

    Ray gives each of its processes half a minute or less and then ends it, but the machine may just be busy.
    """
    fork_workers(folder)
    # Each node has its own folder, because Ray's file names race when several nodes start at once.
    temp = folder / settings.name
    node_class = ray_private.get_node_class()
    for last_try in (False, True):
        temp.mkdir(parents=True)
        params = _build_parameters(
            temp, settings, gcs_address=address, env_vars=dict(environment), include_dashboard=dashboard
        )
        # If the constructor raises, the object is still needed to end its processes.
        node = node_class.__new__(node_class)
        try:
            node.__init__(params, head=address is None, shutdown_at_exit=False, spawn_reaper=False)
            break
        except Exception as error:  # Ray raises a plain Exception here, or ValueError for wrong settings.
            failed = ClusterStartFailed(f"{settings.name} didn't start: {error}\n{_read_log_ends(temp)}")
            hopeless = last_try or isinstance(error, ValueError)
            # This also ends processes that hung before they opened a log.
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            kill(processes(temp))
            if hopeless:
                raise failed from error
        log.warning("starting it again: %s", failed)
        shutil.rmtree(temp)
    # `ray start` does the same. A job reads its cluster's address from this file; without it, the job would search the
    # machine's processes for any cluster.
    ray_private.write_address(node.gcs_address, str(temp))
    return node


def fork_workers(folder: Path) -> None:
    """Make the raylets that this process starts fork their workers, if the cluster in a folder has a fork server."""
    ray_private.start_processes_by(functools.partial(_Started, folder / FORKS))


class _Started(subprocess.Popen):
    """A process of Ray's that inherits a blocked SIGINT, as Ray wants it."""

    def __init__(self, forks: Path, command: list[str], *, preexec_fn: object, **options: Any) -> None:
        if forks.exists():
            worker, is_forked = (
                f"--python_worker_command={shlex.join(python)} "
                for python in ([sys.executable], fork_server.build_command(forks))
            )
            command = [argument.replace(worker, is_forked) for argument in command]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().__init__(command, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _build_parameters(temp: Path, settings: NodeSettings, **parameters: Any) -> Any:
    return ray_private.get_node_parameters(
        temp_dir=str(temp),
        node_ip_address=LOOPBACK,
        node_name=settings.name,
        num_cpus=settings.cpus,
        num_gpus=0,
        resources=dict(settings.resources),
        labels=dict(settings.labels),
        object_store_memory=settings.object_store_bytes,
        memory=_MEMORY_BYTES,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        dashboard_agent_listen_port=0,  # The default is one port for all nodes, for which each would wait.
        dashboard_host=LOOPBACK,
        dashboard_port=0,
        include_log_monitor=False,
        no_monitor=True,  # There is nothing to scale.
        **parameters,
    )


def find_tpu_variables() -> dict[str, str]:
    """Return the environment of a node that has this machine's chips: the variables that describe its TPU."""
    of_this_machine = {name: value for name, value in os.environ.items() if name.startswith("TPU_")}
    return of_this_machine | {"JAX_PLATFORMS": "tpu,cpu"}


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Give processes that are started meanwhile the environment of an emulated cluster, and the user's token."""
    make_token()
    # Ray would apply a real TPU's variables to every node.
    of_this_machine = [name for name in os.environ if name.startswith("TPU_")]
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, *of_this_machine)}
    for name in of_this_machine:
        del os.environ[name]
    os.environ.update(ENVIRONMENT)
    try:
        with ray_private.keep_joined_cluster():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of the emulated cluster, or of the node, with this folder.

    They are recognised by their open files below the folder, where all of Ray's processes write logs. Ray's agents and
    workers outlive a killed raylet, and overwrite their command line and environment with their title.
    """
    matches = []
    for process in psutil.process_iter():
        if process.pid != os.getpid() and any(name.startswith(f"{folder}/") for name in _list_open_files(process.pid)):
            matches.append(process)
    return matches


def kill(victims: list[psutil.Process]) -> None:
    """Kill processes with SIGKILL, which also ends stopped ones, and wait until they are gone."""
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(victims, timeout=10)


def _read_log_ends(folder: Path) -> str:
    """Return the last lines of each log of a node that didn't come up; Ray itself only says that it took too long."""
    logs = sorted(path for path in folder.glob("session_*/logs/*") if path.is_file() and path.stat().st_size)
    ends = {path.name: path.read_text(errors="replace").splitlines()[-3:] for path in logs}
    return "\n".join(f"{name}: {line}" for name, end in ends.items() for line in end)


def _list_open_files(pid: int) -> list[str]:
    names = []
    with contextlib.suppress(OSError):  # The process may be gone, or another user's.
        for link in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(link.path))
    return names
