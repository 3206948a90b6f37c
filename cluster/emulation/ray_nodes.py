"""Start Ray nodes on this machine as one start of a cluster needs them, and find their processes again."""

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
FORKS = "forks"  # where a cluster's fork server listens, in its folder, if it has one

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # see connect.py
    "RAY_enable_worker_prestart": "0",  # idle Python processes on every node; there are two cores for all of them
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",  # of calls: 0.2 MB a video, which nobody reads here
    "RAY_task_events_max_num_task_in_gcs": "100",  # drivers report theirs; 100,000 are the default
    "RAY_memory_monitor_refresh_ms": "0",  # each node would see the memory of all, and kill for it
    "RAY_health_check_period_ms": "1000",  # five in a row make a node dead: 5 s instead of Ray's 15
    "RAY_JOB_STOP_WAIT_TIME_S": "60",  # a job that is stopped takes its pipeline down; Ray kills it after 3 s
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True)
class NodeSettings:
    """One Ray node. `name` is its folder's name; the rest is as Ray counts it.

    variables  of its processes' environment, such as those that GKE gives to TPU hosts
    """

    name: str
    cpus: int
    object_store_bytes: int
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def start_head(folder: Path, settings: NodeSettings, *, dashboard: bool) -> tuple[str, str | None]:
    """Start GCS and head node; return the GCS's "host:port", and that of the dashboard, which takes jobs, if wanted."""
    # Serve's controller, proxies and ingresses are all there, so no other node has to know.
    own = haproxy.environment(folder)
    node = _start(folder, settings, None, ENVIRONMENT | own, dashboard=dashboard)
    return node.gcs_address, node.webui_url or None if dashboard else None


def start_host(folder: Path, settings: NodeSettings, address: str) -> str:
    """Start one more node of the cluster at `address`; return its node id. Several may start at once, in threads."""
    shutil.rmtree(folder / settings.name, ignore_errors=True)  # of a host that was killed, which this one replaces
    return _start(folder, settings, address, {**ENVIRONMENT, **settings.variables}, dashboard=False).node_id


def _start(
    folder: Path, settings: NodeSettings, address: str | None, environment: Mapping[str, str], *, dashboard: bool
) -> Any:
    """Start a node, and once more if it doesn't come up; return Ray's object.

    Ray gives each of its processes half a minute or less, and ends those that are late: the machine may be busy.
    """
    fork_workers(folder)
    temp = folder / settings.name  # a folder for each node: Ray's file names race when nodes start at once
    node_class = ray_private.node_class()
    for last_try in (False, True):
        temp.mkdir(parents=True)
        params = _parameters(
            temp, settings, gcs_address=address, env_vars=dict(environment), include_dashboard=dashboard
        )
        node = node_class.__new__(node_class)  # to ask it for its processes when its constructor raises
        try:
            node.__init__(params, head=address is None, shutdown_at_exit=False, spawn_reaper=False)
            break
        except Exception as error:  # Ray raises plain Exception here, ValueError for settings
            failed = ClusterStartFailed(f"{settings.name} didn't start: {error}\n{_last_words(temp)}")
            hopeless = last_try or isinstance(error, ValueError)
            node.kill_all_processes(check_alive=False, allow_graceful=False)  # also those that hung before their log
            kill(processes(temp))
            if hopeless:
                raise failed from error
        log.warning("once more: %s", failed)
        shutil.rmtree(temp)
    # As `ray start` does. A job asks this file for its cluster; without it, the processes of the machine for any.
    ray_private.write_address(node.gcs_address, str(temp))
    return node


def fork_workers(folder: Path) -> None:
    """Let raylets that this process starts have their workers forked, if the cluster in that folder has a server."""
    ray_private.start_processes_by(functools.partial(_Started, folder / FORKS))


class _Started(subprocess.Popen):
    """A process of Ray's. It has SIGINT blocked, as Ray wants it, which it inherits."""

    def __init__(self, forks: Path, command: list[str], *, preexec_fn: object, **options: Any) -> None:
        if forks.exists():
            worker, forked = (
                f"--python_worker_command={shlex.join(python)} "
                for python in ([sys.executable], fork_server.command(forks))
            )
            command = [argument.replace(worker, forked) for argument in command]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().__init__(command, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _parameters(temp: Path, settings: NodeSettings, **more: Any) -> Any:
    """Return what Ray's class of a node takes."""
    return ray_private.node_parameters(
        temp_dir=str(temp),
        node_ip_address=LOOPBACK,
        node_name=settings.name,
        num_cpus=settings.cpus,
        num_gpus=0,
        resources=dict(settings.resources),
        labels=dict(settings.labels),
        object_store_memory=settings.object_store_bytes,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        dashboard_agent_listen_port=0,  # the default is one port for all, waited for
        dashboard_host=LOOPBACK,
        dashboard_port=0,
        include_log_monitor=False,
        no_monitor=True,  # of the autoscaler
        **more,
    )


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Give every process that is started meanwhile the environment of an emulated cluster, and the user's token."""
    make_token()
    of_this_machine = [name for name in os.environ if name.startswith("TPU_")]  # Ray would take it for every node's.
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, *of_this_machine)}
    for name in of_this_machine:
        del os.environ[name]
    os.environ.update(ENVIRONMENT)
    try:
        with ray_private.joined_cluster_kept():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of the emulated cluster, or of the one node, whose folder this is.

    They are those that hold a file below it open: all of Ray's processes log there. Ray's agents and workers outlive
    a killed raylet, and have overwritten their command line and environment with their title.
    """
    matches = []
    for process in psutil.process_iter():
        if process.pid != os.getpid() and any(name.startswith(f"{folder}/") for name in _open_files(process.pid)):
            matches.append(process)
    return matches


def kill(victims: list[psutil.Process], timeout_s: float = 10) -> None:
    """SIGKILL them, stopped ones too, and wait until they are gone."""
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(victims, timeout=timeout_s)


def _last_words(folder: Path, lines: int = 3) -> str:
    """Return the end of each log of a node that hasn't come up: Ray itself says no more than that it took too long."""
    logs = sorted(path for path in folder.glob("session_*/logs/*") if path.is_file() and path.stat().st_size)
    ends = {path.name: path.read_text(errors="replace").splitlines()[-lines:] for path in logs}
    return "\n".join(f"{name}: {line}" for name, end in ends.items() for line in end)


def _open_files(pid: int) -> list[str]:
    names = []
    with contextlib.suppress(OSError):  # gone, or not ours to look into
        for link in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(link.path))
    return names
