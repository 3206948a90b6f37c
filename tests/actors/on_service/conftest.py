"""The whole service on an emulated cluster: HAProxy, ingress, worker, and a pipeline with a small model."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
from pathlib import Path

import pytest
from openai import OpenAI

from actors.api.deploy import deploy_service, take_down
from actors.api.settings import ServiceSettings
from actors.jobs.database import Database
from actors.jobs.store import JobStore
from actors.observe.console import LiveConsole
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.reliability import ReliabilitySettings
from cluster.connect import connect, leave
from cluster.emulation import ray_nodes
from cluster.emulation.cluster import EmulatedCluster, list_emulated_slices
from cluster.layout import Layout
from tests.actors.on_slices.running import title
from tests.conftest import STAGES
from wan_tpu.families import open_spec

LAYOUT_TEXT = """
emulate: {devices_per_host: 1}
pools:
  all: {stages: [encoder, denoise_high, denoise_low, decoder], slice: v6e-1}
"""
LAYOUT = Layout.parse(LAYOUT_TEXT, "the service's layout")


class Online:
    """A service that runs: where, and its processes."""

    def __init__(self, cluster, settings, spec, port):
        self.cluster, self.settings, self.spec, self.port = cluster, settings, spec, port
        self.address = f"http://127.0.0.1:{port}"

    def client(self, **options):
        return OpenAI(base_url=f"{self.address}/v1", api_key="none", **options)

    def processes(self, *names):
        """Return the cluster's processes whose title has one of these names in it."""
        processes = ray_nodes.processes(self.cluster.temp)
        return [process for process in processes if any(name in title(process) for name in names)]

    def counts(self):
        return JobStore(Database(self.settings.database)).count_jobs().by_status

    def read_events(self):
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
    """Return a port that nobody listens on, below those that the system gives outgoing connections meanwhile."""
    for port in random.sample(range(20_000, 21_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("of a hundred ports none is free")


@contextlib.contextmanager
def deploy_emulated(settings, spec, folder, forks, **drain):
    """Give a service on an emulated cluster of its own."""
    port = free_port()
    with EmulatedCluster.start(list_emulated_slices(spec.layout), folder=folder / "cluster", forks=forks) as cluster:
        connect(cluster.address)
        try:
            with LiveConsole() as live:
                deploy_service(settings, spec, host="127.0.0.1", port=port, on_status=live.tell)
            yield Online(cluster, settings, spec, port)
            take_down(spec.settings.name, **drain)
        finally:
            for log in sorted(Path(cluster.temp).glob("*/session_latest/logs/*.err")):
                text = log.read_text(errors="replace")
                if "actors" in text:
                    print(log.name, text[-6000:])
            leave()


@pytest.fixture(scope="package")
def online(checkpoint, tmp_path_factory, forks):
    folder = tmp_path_factory.mktemp("service")
    model = shutil.copytree(checkpoint("wan2.2-i2v-a14b"), folder / "small-wan")
    spec = PipelineSpec(
        LAYOUT,
        PipelineSettings(str(model), str(folder / "snapshots"), dtype="float32", snapshot_every=10),
        open_spec(model),
        lasting=True,
    )
    settings = ServiceSettings(
        database=str(folder / "jobs.sqlite"),
        storage=str(folder / "results"),
        model="small-wan",
        webhook_secret_file=str(folder / "secret"),
        chips=dict.fromkeys(STAGES, 1),
        largest=((64, 64, 17),),
        reliability=ReliabilitySettings(lease_s=5.0),
    )
    with deploy_emulated(settings, spec, folder, forks) as service:
        yield service
