"""Start Ray nodes on this machine as one start of a cluster needs them, and find their processes again.

The one file that uses Ray's private classes: `ray start` takes three times as long for the same, and
`ray.cluster_utils.Cluster` overwrites the address that other clusters of this machine are found by.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cluster import haproxy
from cluster.authentication import make_token
from cluster.errors import ClusterStartFailed

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

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
    """One Ray node. `name` is its folder's name; the rest is as Ray counts it."""

    name: str
    cpus: int
    object_store_bytes: int
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Head:
    """What the head listens on: the GCS "host:port", and the dashboard, which takes jobs, "host:port" or None."""

    address: str
    dashboard: str | None


def start_head(folder: Path, settings: NodeSettings, *, dashboard: bool) -> Head:
    """Start GCS and head node; the dashboard only where it is wanted (3 s of CPU)."""
    # Serve's controller, proxies and ingresses are all there, so no other node has to know.
    own = haproxy.environment(folder)
    node = _start(folder, settings, None, ENVIRONMENT | own, include_dashboard=dashboard)
    return Head(node.gcs_address, node.webui_url or None if dashboard else None)


def start_host(folder: Path, settings: NodeSettings, address: str) -> str:
    """Start one more node of the cluster at `address`; return its node id. Several may start at once, in threads."""
    return _start(folder, settings, address, ENVIRONMENT).node_id


def _start(folder: Path, settings: NodeSettings, *args: Any, **kwargs: Any) -> Any:
    """Start a node, twice if need be: Ray gives each of its processes half a minute or less, fixed.

    The machine may be busy, or the child may hang: Ray forks it from a process with threads, with Python to run before
    it becomes another program.
    """
    try:
        return _start_once(folder, settings, *args, **kwargs)
    except ClusterStartFailed as error:
        if "timed out" not in str(error.__cause__).lower():
            raise
        log.warning("once more: %s", error)
    kill(processes(folder / settings.name))
    shutil.rmtree(folder / settings.name)
    return _start_once(folder, settings, *args, **kwargs)


def _start_once(
    folder: Path,
    settings: NodeSettings,
    address: str | None,
    environment: Mapping[str, str],
    include_dashboard: bool = False,
) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.utils import write_ray_address

    temp = folder / settings.name  # a folder for each node: Ray's file names race when nodes start at once
    temp.mkdir(parents=True)
    make: Any = RayParams  # Ray annotates some of these wrongly
    params = make(
        gcs_address=address,
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
        include_dashboard=include_dashboard,
        include_log_monitor=False,
        no_monitor=True,  # of the autoscaler
        env_vars=dict(environment),
    )
    try:
        node = Node(params, head=address is None, shutdown_at_exit=False, spawn_reaper=False)
    except Exception as error:  # Ray raises plain Exception here
        raise ClusterStartFailed(f"{settings.name} didn't start: {error}\n{_last_words(temp)}") from error
    # As `ray start` does. A job asks this file for its cluster; without it, the processes of the machine for any.
    write_ray_address(node.gcs_address, str(temp))
    return node


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Give every process that is started meanwhile the environment of an emulated cluster, and the user's token."""
    make_token()
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of the emulated cluster, or of the one node, whose folder this is.

    They are those that hold a file below it open: all of Ray's processes log there. Ray's agents and workers outlive
    a killed raylet, and have overwritten their command line and environment with their title.
    """
    found = []
    for process in psutil.process_iter():
        if process.pid != os.getpid() and any(name.startswith(f"{folder}/") for name in _open_files(process.pid)):
            found.append(process)
    return found


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
