"""An emulated cluster: real Ray nodes on this machine with the labels and resources of TPU hosts, without the chips.

It lives in a folder, which holds one small file (`cluster.json`) that says what was started; by it any process can find
the cluster, and stop it, also after a crash. Ray's nodes listen on the loopback interface only.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.emulation import fork_server, ray_nodes
from cluster.errors import ClusterNotFound, ClusterStartFailed, LayoutError
from cluster.layout import Layout
from cluster.slice_spec import DEVICES, SliceSpec

STATE = "cluster.json"
HEAD_CPUS, HOST_CPUS = 32, 4  # what Ray counts, not cores


@dataclass(frozen=True)
class EmulatedSlice:
    """A slice to emulate: its name, its kind, and how many CPU devices each host shows instead of its chips."""

    name: str
    spec: SliceSpec
    devices_per_host: int = 1

    def host(self, worker_id: int, settings: "Settings") -> ray_nodes.NodeSettings:
        """Return the node that plays the host with that worker id."""
        return ray_nodes.NodeSettings(
            name=f"{self.name}-{worker_id}",
            cpus=HOST_CPUS,
            object_store_bytes=settings.host_store_mib * 2**20,
            resources={**self.spec.host_resources(worker_id), self.name: 1},
            labels=self.spec.host_labels(worker_id, self.name) | {DEVICES: str(self.devices_per_host)},
        )


def emulated_slices(layout: Layout) -> tuple[EmulatedSlice, ...]:
    """Return a slice for every replica that a layout may have; raises `LayoutError` for one without `emulate:`."""
    if layout.devices_per_host is None:
        raise LayoutError(
            f"{layout.source}: it is for real TPUs; add emulate: {{devices_per_host: 1}} to emulate it here"
        )
    # Named and numbered by kind, as a cloud would: which pool takes which is the scheduler's choice.
    wanted: Counter[SliceSpec] = Counter()
    for pool in layout.pools:
        wanted[pool.slice] += pool.replicas.maximum
    return tuple(
        EmulatedSlice(f"{spec.pod_type}-{i}", spec, layout.devices_per_host)
        for spec, count in wanted.items()
        for i in range(count)
    )


@dataclass(frozen=True)
class Settings:
    """What isn't the slices'. Stores are shared memory, used as needed.

    dashboard  takes jobs (`ray job submit`); costs 3 s of CPU at start
    """

    dashboard: bool = False
    head_store_mib: int = 512
    host_store_mib: int = 256


def default_folder() -> Path:
    """Return where this user's state is unless told: clusters that run, jobs, keys. Nobody else can make it first."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "wan-tpu"


@dataclass
class EmulatedCluster:
    """A running emulated cluster; use `start` or `attach`.

    address    of its GCS, "host:port"; dashboard "host:port" where there is one
    temp       Ray's own files, outside of `folder` because the paths of sockets are short
    slices     and `settings`: known to the process that has started it only
    """

    folder: Path
    temp: Path
    address: str
    dashboard: str | None
    slices: tuple[EmulatedSlice, ...] = ()
    settings: Settings = Settings()
    _guard: subprocess.Popen | None = None

    @classmethod
    def start(
        cls,
        slices: Iterable[EmulatedSlice],
        settings: Settings = Settings(),
        *,
        folder: Path | None = None,
        outlive: bool = False,
        imports: str | None = None,
        forks: Path | None = None,
    ) -> "EmulatedCluster":
        """Start head and hosts and return when all are registered.

        folder   for the state file, `default_folder()` when left out
        outlive  go on when this process ends; else the cluster ends with it, even if it is killed
        imports  a module that workers have imported when they start: once for all of them (fork_server.py)
        forks    a server that forks workers and runs already, for several clusters, in place of `imports`

        Raises `ClusterNotFound` when one is running there already, `ClusterStartFailed` when a node doesn't come up.
        """
        slices = tuple(slices)
        folder = (folder or default_folder()).absolute()
        _check_folder(folder)
        _refuse_second(folder, slices)
        _check_name()
        temp = Path(tempfile.mkdtemp(prefix="wan-"))
        cluster = cls(folder, temp, "", None, slices, settings)
        cluster._save()  # from here on `stop` finds what was started
        if not outlive:
            cluster._guard = _guard(folder)
        try:
            with ray_nodes.environment():
                if imports is not None:
                    fork_server.start(temp / ray_nodes.FORKS, imports)
                if forks is not None:
                    (temp / ray_nodes.FORKS).symlink_to(forks)
                head = ray_nodes.NodeSettings("head", HEAD_CPUS, settings.head_store_mib * 2**20)
                cluster.address, cluster.dashboard = ray_nodes.start_head(temp, head, dashboard=settings.dashboard)
                cluster._save()
                cluster._start_hosts([s.host(worker_id, settings) for s in slices for worker_id in range(s.spec.hosts)])
        except BaseException as error:
            cluster.stop()
            if isinstance(error, Exception) and not isinstance(error, ClusterStartFailed):
                raise ClusterStartFailed(f"the emulated cluster's head didn't start: {error}") from error
            raise
        return cluster

    @classmethod
    def attach(cls, folder: Path | None = None) -> "EmulatedCluster":
        """Return the cluster that another process has started in `folder`. Raises `ClusterNotFound`."""
        path = (folder or default_folder()).absolute() / STATE
        try:
            _check_own(path)
            state = json.loads(path.read_text())
            temp = Path(state["temp"])
            with contextlib.suppress(FileNotFoundError):  # as after a crash of the machine
                _check_own(temp)
            return cls(path.parent, temp, state["address"], state["dashboard"])
        except FileNotFoundError:
            raise ClusterNotFound(f"no emulated cluster in {path.parent}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterNotFound(f"{path} is damaged ({error!r}); remove it") from None

    @property
    def running(self) -> bool:
        """Whether any of its processes lives."""
        return bool(ray_nodes.processes(self.temp))

    def kill_host(self, slice_name: str, worker_id: int) -> None:
        """Kill a host as if its machine had lost power: raylet, agents and workers at once."""
        ray_nodes.kill(ray_nodes.processes(self.temp / self._host(slice_name, worker_id).name))

    def add_host(self, slice_name: str, worker_id: int, **changed: Any) -> str:
        """Start a replacement of a killed host; return its node id.

        Its labels and resources are the same, but for the fields of `NodeSettings` that are changed.
        """
        host = dataclasses.replace(self._host(slice_name, worker_id), **changed)
        with ray_nodes.environment():
            return ray_nodes.start_host(self.temp, host, self.address)

    def stop(self) -> None:
        """Kill every process of this cluster, whoever started it, and remove its files. Others are left alone."""
        while survivors := ray_nodes.processes(self.temp):  # a dying parent may have started one more
            ray_nodes.kill(survivors)
        shutil.rmtree(self.temp, ignore_errors=True)
        (self.folder / STATE).unlink(missing_ok=True)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait(timeout=30)
            self._guard = None

    def __enter__(self) -> "EmulatedCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _host(self, slice_name: str, worker_id: int) -> ray_nodes.NodeSettings:
        return next(s for s in self.slices if s.name == slice_name).host(worker_id, self.settings)

    def _start_hosts(self, hosts: Sequence[ray_nodes.NodeSettings]) -> None:
        # As many at once as there are cores: a node is 2 s of CPU, and more at once were slower than one by one.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            started = [pool.submit(ray_nodes.start_host, self.temp, host, self.address) for host in hosts]
        if failed := [error for future in started if (error := future.exception())]:
            reasons = "; ".join(map(str, failed))
            raise ClusterStartFailed(f"{len(failed)} of {len(hosts)} emulated hosts didn't start ({reasons})")

    def _save(self) -> None:
        state = {"temp": str(self.temp), "address": self.address, "dashboard": self.dashboard}
        _check_own(self.folder)
        part = self.folder / f"{STATE}.part"
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(state, file, indent=1)
        part.replace(self.folder / STATE)


def _check_folder(folder: Path) -> None:
    """Make the folder of the state, and refuse one that can't be written to before anything is started."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ClusterStartFailed(f"{folder} can't be made ({error.strerror}); give another folder") from None
    if not os.access(folder, os.W_OK):
        raise ClusterStartFailed(f"{folder} can't be written to; give another folder")


def _check_own(path: Path) -> None:
    """Refuse what another user has made: it names processes to end and a folder to delete."""
    owner = path.lstat().st_uid
    if owner != os.getuid():
        raise ClusterNotFound(f"{path} belongs to the user with id {owner}, not to you, and isn't trusted; remove it")


def _refuse_second(folder: Path, slices: Sequence[EmulatedSlice]) -> None:
    names = [s.name for s in slices]
    if len(set(names)) != len(names):
        raise ClusterStartFailed(f"two emulated slices have the same name: {', '.join(sorted(names))}")
    with contextlib.suppress(ClusterNotFound):
        existing = EmulatedCluster.attach(folder)
        if existing.running:
            down = shlex.join(["wan-tpu", "cluster", "down", "--folder", str(folder)])
            raise ClusterStartFailed(
                f"an emulated cluster runs in {folder} already (at {existing.address}); stop it ({down}), or choose "
                "another --folder"
            )
        existing.stop()  # what a crash has left


def _check_name() -> None:
    """Refuse a machine whose own name leads nowhere: where CPUs stand for chips, hosts find each other by it (gloo)."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise ClusterStartFailed(
            f"the name of this machine, {name}, leads to no address, and emulated hosts find each other by it; "
            f"add the line '127.0.1.1 {name}' to /etc/hosts"
        ) from None


def _guard(folder: Path) -> subprocess.Popen:
    """Start a process that stops the cluster in `folder` when this process ends, however it ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.emulation.cluster", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is not for it
    )


if __name__ == "__main__":
    sys.stdin.read()  # returns when the process at the other end of the pipe is gone
    with contextlib.suppress(ClusterNotFound):
        EmulatedCluster.attach(Path(sys.argv[1])).stop()
