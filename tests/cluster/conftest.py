"""One emulated cluster for all tests of this package: two slices of one host, one of two hosts."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
import ray

from cluster.connect import connect, leave
from cluster.emulation.cluster import EmulatedCluster, EmulatedSlice
from cluster.slice_spec import SliceSpec
from tests.waiting import SECONDS, wait_for

ONE_HOST = SliceSpec("v6e-1")
TWO_HOSTS = SliceSpec("v5p-16")
SLICES = (EmulatedSlice("one-a", ONE_HOST), EmulatedSlice("one-b", ONE_HOST), EmulatedSlice("two", TWO_HOSTS, 2))
CHIPS = sum(s.spec.chips for s in SLICES)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedCluster]:
    with EmulatedCluster.start(SLICES, folder=tmp_path_factory.mktemp("cluster"), imports="jax") as running:
        connect(running.address)
        yield running
        leave()


@pytest.fixture
def all_free(cluster: EmulatedCluster) -> Iterator[Callable[..., None]]:
    """Return a function that waits until all chips are free and some processes are gone; wait again after the test."""

    def wait(*pids: int, chips: int = CHIPS) -> None:
        wait_for(lambda: ray.available_resources().get("TPU") == chips, "all chips free", pause_s=0.1)
        wait_for(lambda: not any(map(psutil.pid_exists, pids)), f"no process of {pids}")

    yield wait
    wait()


def drain(cluster: EmulatedCluster, node_id: str, seconds: float) -> None:
    """Tell Ray that a node will go away, as an operator or a notice of preemption does."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
    command += ["--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    subprocess.run(
        [*command, "--deadline-remaining-seconds", str(seconds)], check=True, timeout=SECONDS, capture_output=True
    )
