"""An emulated cluster: real Ray nodes on this machine with the labels and resources of TPU hosts, without the chips.

Its folder holds one small file (`cluster.json`) that says what was started. With it, any process can find the cluster
and stop it, even after a crash. Ray's nodes listen on the loopback interface only.
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
_SHORT = Path("/tmp")
# Characters of a temporary folder's path: that of HAProxy's socket has 84 more, and may have 97. Ray's are shorter.
_LONGEST = 13
HEAD_CPUS, HOST_CPUS = 32, 4  # How many CPUs Ray counts, whatever the machine has.


@dataclass(frozen=True)
class EmulatedSlice:
    """A slice to start on this machine."""

    name: str
    spec: SliceSpec
    # How many CPU devices each host shows in place of its chips; None where these are real.
    devices_per_host: int | None = 1

    def host(self, worker_id: int, settings: "Settings") -> ray_nodes.NodeSettings:
        """Return the node that emulates the host with a worker id."""
        is_emulated = self.devices_per_host is not None
        return ray_nodes.NodeSettings(
            name=f"{self.name}-{worker_id}",
            cpus=HOST_CPUS,
            object_store_bytes=settings.host_store_mib * 2**20,
            resources={**self.spec.build_host_resources(worker_id), self.name: 1},
            labels=self.spec.build_host_labels(worker_id, self.name)
            | ({DEVICES: str(self.devices_per_host)} if is_emulated else {}),
            variables={} if is_emulated else ray_nodes.find_tpu_variables(),
        )


def list_emulated_slices(layout: Layout) -> tuple[EmulatedSlice, ...]:
    """Return a slice for every replica that a layout may have.

    Raises:
        LayoutError: The layout has no `emulate:`.
    """
    if layout.devices_per_host is None:
        raise LayoutError(
            f"{layout.source}: it is for real TPUs; add emulate: {{devices_per_host: 1}} to emulate it on this machine"
        )
    # Slices are named and numbered by kind, as in a cloud, because the scheduler chooses which pool takes which.
    counts: Counter[SliceSpec] = Counter()
    for pool in layout.pools:
        counts[pool.slice] += pool.replicas.maximum
    return tuple(
        EmulatedSlice(f"{spec.pod_type}-{i}", spec, layout.devices_per_host)
        for spec, count in counts.items()
        for i in range(count)
    )


@dataclass(frozen=True)
class Settings:
    """Settings of an emulated cluster apart from its slices."""

    # Whether to start the dashboard, which accepts jobs (`ray job submit`) and takes 3 s of CPU to start.
    dashboard: bool = False
    head_store_mib: int = 512  # The size of the head's object store, which is shared memory and is allocated as needed.
    host_store_mib: int = 256

    def head(self) -> ray_nodes.NodeSettings:
        """Return the head node. It has no chips: Ray would give it those that it finds on the machine."""
        return ray_nodes.NodeSettings("head", HEAD_CPUS, self.head_store_mib * 2**20, {"TPU": 0})


def find_default_folder() -> Path:
    """Return the default folder of this user's running clusters, jobs and keys; nobody else can create it first."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "wan-tpu"


@dataclass
class EmulatedCluster:
    """A running emulated cluster, which `start` or `attach` returns."""

    folder: Path
    temp: Path  # The folder of Ray's own files, outside of `folder` because the paths of sockets must be short.
    address: str  # "host:port" of its GCS.
    dashboard: str | None  # "host:port" of its dashboard, or None.
    slices: tuple[EmulatedSlice, ...] = ()  # Its slices, known only to the process that started it.
    settings: Settings = Settings()  # Its settings, known only to the process that started it.
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
        """Start head and hosts, and return when all are registered.

        Args:
            folder: The folder of the state file, by default `find_default_folder()`.
            outlive: Keep running when this process ends. By default the cluster ends with it, even if it is killed.
            imports: A module to import once for all workers, which are then forked (fork_server.py).
            forks: The socket of a fork server that runs already, for several clusters, in place of `imports`.

        Raises:
            ClusterStartFailed: A node didn't come up, or a cluster is already running there.
            ClusterNotFound: The folder belongs to another user.
        """
        slices = tuple(slices)
        folder = (folder or find_default_folder()).absolute()
        _check_folder(folder)
        _refuse_second(folder, slices)
        _check_name()
        temp = Path(tempfile.mkdtemp(prefix="wan-", dir=_find_temporary_folder()))
        cluster = cls(folder, temp, "", None, slices, settings)
        cluster._save()  # From here on, `stop` finds what was started.
        if not outlive:
            cluster._guard = _guard(folder)
        hosts = [s.host(worker_id, settings) for s in slices for worker_id in range(s.spec.hosts)]
        try:
            with ray_nodes.environment():
                if imports is not None:
                    fork_server.start(temp / ray_nodes.FORKS, imports)
                if forks is not None:
                    (temp / ray_nodes.FORKS).symlink_to(forks)
                head = settings.head()
                cluster.address, cluster.dashboard = ray_nodes.start_head(temp, head, dashboard=settings.dashboard)
                cluster._save()
                cluster._start_hosts(hosts)
        except BaseException as error:
            cluster.stop()
            if isinstance(error, Exception) and not isinstance(error, ClusterStartFailed):
                raise ClusterStartFailed(f"the emulated cluster's head didn't start: {error}") from error
            raise
        return cluster

    @classmethod
    def attach(cls, folder: Path | None = None) -> "EmulatedCluster":
        """Return the cluster that another process has started in `folder`.

        Raises:
            ClusterNotFound: There is none, or its state is damaged or another user's.
        """
        path = (folder or find_default_folder()).absolute() / STATE
        try:
            _check_own(path)
            state = json.loads(path.read_text())
            temp = Path(state["temp"])
            with contextlib.suppress(FileNotFoundError):  # The folder is gone if the machine has crashed.
                _check_own(temp)
            return cls(path.parent, temp, state["address"], state["dashboard"])
        except FileNotFoundError:
            raise ClusterNotFound(f"no emulated cluster in {path.parent}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterNotFound(f"{path} is damaged ({error!r}); remove it") from None

    @property
    def running(self) -> bool:
        """Whether any of its processes is alive."""
        return bool(ray_nodes.processes(self.temp))

    def kill_host(self, slice_name: str, worker_id: int) -> None:
        """Kill a host as if its machine had lost power: raylet, agents and workers at once."""
        ray_nodes.kill(ray_nodes.processes(self.temp / self._host(slice_name, worker_id).name))

    def add_host(self, slice_name: str, worker_id: int, **changed: Any) -> str:
        """Start a replacement for a killed host, `changed` in some fields of `NodeSettings`; return its node id."""
        host = dataclasses.replace(self._host(slice_name, worker_id), **changed)
        with ray_nodes.environment():
            return ray_nodes.start_host(self.temp, host, self.address)

    def stop(self) -> None:
        """Kill every process of this cluster, including those of other drivers, and remove its files."""
        while survivors := ray_nodes.processes(self.temp):  # A dying parent may have started another one.
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
        # As many start at once as there are cores: a node takes 2 s of CPU, and more were slower than one by one.
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
    """Create the folder of the state, and refuse one that can't be written to before anything is started."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ClusterStartFailed(f"{folder} can't be created ({error.strerror}); give another folder") from None
    if not os.access(folder, os.W_OK):
        raise ClusterStartFailed(f"{folder} can't be written to; give another folder")


def _find_temporary_folder() -> Path:
    """Return the folder for a cluster's own: the usual one, or /tmp if paths of sockets would be too long there."""
    usual = Path(tempfile.gettempdir()).absolute()
    folder = usual if len(os.fsencode(usual)) <= _LONGEST else _SHORT
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ClusterStartFailed(
            f"the path of the temporary folder, {usual}, has more than {_LONGEST} characters, and paths of an emulated "
            "cluster's sockets would be too long; set TMPDIR to a folder with a shorter path"
        )
    return folder


def _check_own(path: Path) -> None:
    """Refuse a file or folder of another user, because it names processes to end and a folder to delete."""
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
        existing.stop()  # This removes what a crash has left behind.


def _check_name() -> None:
    """Refuse a machine whose own name doesn't resolve: emulated hosts find each other by it (gloo)."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        raise ClusterStartFailed(
            f"the name of this machine, {name}, doesn't resolve to an address, which emulated hosts need to find "
            f"each other; add the line '127.0.1.1 {name}' to /etc/hosts"
        ) from None


def _guard(folder: Path) -> subprocess.Popen:
    """Start a process that stops the cluster in `folder` when this process ends, however it ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.emulation.cluster", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # It must survive a Ctrl-C in the terminal.
    )


if __name__ == "__main__":
    sys.stdin.read()  # This returns when the process at the other end of the pipe is gone.
    with contextlib.suppress(ClusterNotFound):
        EmulatedCluster.attach(Path(sys.argv[1])).stop()
