"""TPU hosts as a cloud lends them: each a `ray start --block` of its own, which a signal tells that it goes."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

from cluster.emulation import ray_nodes
from cluster.emulation.cluster import EmulatedCluster, EmulatedSlice, Settings
from cluster.provision.pods import ENVIRONMENT

NOTICE_S = 15.0  # from GKE's notice to the end of a spot node


class SpotSlice:
    """A slice of a kind: its machines are there, or not, and are other ones each time."""

    _numbers = itertools.count()

    def __init__(self, cluster: EmulatedCluster, kind: EmulatedSlice) -> None:
        self._cluster, self._kind = cluster, kind
        self._hosts: dict[str, subprocess.Popen] = {}  # by node name
        self._settings: dict[str, ray_nodes.NodeSettings] = {}
        self._gone_at: float | None = None

    @property
    def there(self) -> bool:
        """Whether it is there and nobody has said that it goes."""
        return bool(self._hosts) and self._gone_at is None

    def boot(self) -> None:
        """Start machines that weren't there before; returns at once."""
        name = f"{self._kind.name}-{next(self._numbers)}"
        machine = EmulatedSlice(name, self._kind.spec, self._kind.devices_per_host)
        for worker_id in range(machine.spec.hosts):
            host = machine.host(worker_id, Settings())
            self._settings[host.name] = host
            self._hosts[host.name] = self._start(host)

    def notice(self) -> None:
        """Say that the slice goes: all its machines at once, as all of a slice are one."""
        self._gone_at = time.monotonic() + NOTICE_S
        for host in self._hosts.values():
            host.send_signal(signal.SIGTERM)

    def look(self) -> bool:
        """Take the machines away when their time is over; return whether there are none.

        Ray ends a machine's processes when one of them starts too late, as on a busy machine: what brings them up on a
        real one, Kubernetes or systemd, then does it again.
        """
        if self._gone_at is not None and time.monotonic() >= self._gone_at:
            for name, host in self._hosts.items():
                ray_nodes.kill(ray_nodes.processes(self._cluster.temp / name))
                host.wait()
            self._hosts, self._gone_at = {}, None
        for name, host in self._hosts.items():
            if self._gone_at is None and host.poll() is not None:
                ray_nodes.kill(ray_nodes.processes(self._cluster.temp / name))
                self._hosts[name] = self._start(self._settings[name])
        return not self._hosts

    def _start(self, host: ray_nodes.NodeSettings) -> subprocess.Popen:
        folder = self._cluster.temp / host.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        command = [
            sys.executable,
            "-m",
            "tests.actors.spot_host",
            "start",
            "--block",
            "--address",
            self._cluster.address,
        ]
        command += ["--node-ip-address", ray_nodes.LOOPBACK, "--node-name", host.name, "--temp-dir", str(folder)]
        command += ["--num-cpus", str(host.cpus), "--resources", json.dumps(dict(host.resources))]
        command += ["--labels", ",".join(f"{name}={value}" for name, value in host.labels.items())]
        command += ["--object-store-memory", str(host.object_store_bytes), "--include-log-monitor", "false"]
        command += ["--dashboard-agent-listen-port", "0"]
        budget = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
        environment = os.environ | ray_nodes.ENVIRONMENT | {budget: ENVIRONMENT[budget]}
        with (folder / "start.log").open("w") as log:  # by it the process is known to be of this node
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
