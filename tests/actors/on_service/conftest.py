"""The whole service on an emulated cluster: HAProxy, ingress, worker, and a pipeline with a small model."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from openai import OpenAI

from actors.api.deploying import deploy_service, take_down
from actors.api.memory import Sizes
from actors.api.settings import ServiceSettings
from actors.jobs.database import Database
from actors.jobs.store import JobStore
from actors.jobs.work import LeaseSettings
from actors.settings import About, PipelineSettings
from cluster import ray_nodes
from cluster.connect import connect, leave
from cluster.emulated import EmulatedCluster
from cluster.layout import Layout
from tests.actors.on_slices.running import title
from wan_tpu.expert import STAGES

LAYOUT = Layout.parse(
    """
emulate: {devices_per_host: 1}
pools:
  all: {stages: [encoder, denoise_high, denoise_low, decoder], slice: v6e-1}
""",
    "the service's layout",
    STAGES,
)


class Online:
    """A service that runs: where, and its processes."""

    def __init__(self, cluster, settings, about, address):
        self.cluster, self.settings, self.about, self.address = cluster, settings, about, address

    def client(self, **options):
        return OpenAI(base_url=f"{self.address}/v1", api_key="none", **options)

    def processes(self, *names):
        """Return the cluster's processes whose title has one of these names in it."""
        found = ray_nodes.processes(self.cluster.temp)
        return [process for process in found if any(name in title(process) for name in names)]

    def counts(self):
        return JobStore(Database(self.settings.database)).counts().by_status

    def told(self):
        """Return the events that the service's processes have logged."""
        for log in Path(self.cluster.temp).glob("head/session_2*/logs/*.err"):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith("{"):
                    yield json.loads(line)

    def kill(self, name):
        """Kill the only process of a deployment."""
        [process] = self.processes(name)
        os.kill(process.pid, signal.SIGKILL)
        return process


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="package")
def online(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    model = shutil.copytree(checkpoint("wan2.2-i2v-a14b"), folder / "small-wan")
    about = About(
        LAYOUT,
        PipelineSettings(str(model), str(folder / "snapshots"), dtype="float32", snapshot_every=10),
        lasting=True,
    )
    settings = ServiceSettings(
        database=str(folder / "jobs.sqlite"),
        storage=str(folder / "results"),
        model="small-wan",
        webhook_secret_file=str(folder / "secret"),
        chips=dict.fromkeys(STAGES, 1),
        room=Sizes(((64, 64, 17),)),
        leases=LeaseSettings(lease_s=5.0),
    )
    port = free_port()
    with EmulatedCluster.start(LAYOUT.emulated_slices(), folder=folder / "cluster") as cluster:
        connect(cluster.address)
        try:
            deploy_service(settings, about, host="127.0.0.1", port=port, tell=Told())
            yield Online(cluster, settings, about, f"http://127.0.0.1:{port}")
            take_down(about.settings.name)
        finally:
            for log in sorted(Path(cluster.temp).glob("*/session_latest/logs/*.err")):
                text = log.read_text(errors="replace")
                if "actors" in text:
                    print(log.name, text[-6000:])
            leave()


class Told:
    """Prints what is waited for, whenever it changes."""

    def __init__(self):
        self._last, self._start = "", time.monotonic()

    def __call__(self, text):
        if text != self._last:
            print(f"{time.monotonic() - self._start:5.1f} s {text}")
            self._last = text
