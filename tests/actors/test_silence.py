"""Nothing waits for an observer: a silent status actor or control store has no news, and the work goes on."""

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray

from actors.errors import PipelineExists
from actors.observe.status_actor import ReplicaStatus, StatusActor, StatusSilent
from actors.pipeline.claim import _Claim, claim_start
from cluster.connect import connect, leave
from cluster.draining import find_drain_s
from cluster.emulation import ray_nodes
from tests.actors.test_status import SPEC
from tests.cluster.conftest import drain
from tests.conftest import ROOT
from tests.waiting import wait_for

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(one_slice):
    connect(one_slice.address)
    yield one_slice
    leave()


@contextlib.contextmanager
def stop_process(cluster, word):
    """Stop the head's process whose command line has a word, as a machine that swaps or hangs does."""

    def find_processes():
        processes = ray_nodes.processes(cluster.temp / "head")
        return [process for process in processes if word in " ".join(process.cmdline())]

    [process] = wait_for(find_processes, word)
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED, f"{word} to stop")
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_status_actor_that_is_silent_stops_nobody(cluster):
    status = StatusActor.create("quiet", SPEC)
    status.report_replica("all/0", ReplicaStatus("all", "", "idle", "", (), time.time()))
    wait_for(lambda: (read := status.read_or_none()) and read.replicas, "the first report")
    with stop_process(cluster, "_StatusActor"):
        start = time.monotonic()
        with pytest.raises(StatusSilent, match="'quiet'"):
            status.read(timeout_s=0.5)
        assert status.read_or_none(timeout_s=0.5) is None
        for number in range(3000):  # more than may wait for it
            status.report_requests("driver", [f"cat-{number}"])
        assert time.monotonic() - start < 10
    wait_for(lambda: status.read_or_none(timeout_s=1.0), "the status actor")
    status.report_requests("driver", ["dog"])
    wait_for(lambda: (read := status.read_or_none()) and set(read.requests) == {"dog"}, "the latest report")
    status.close()


def test_one_process_at_a_time_brings_a_pipeline_up(cluster):
    with claim_start("mine"), pytest.raises(PipelineExists, match="'mine'"), claim_start("mine"):
        pass
    with claim_start("mine"), claim_start("other"):
        pass


def test_claim_ends_with_its_process(cluster):
    code = (
        "import sys, time; from cluster.connect import connect; from actors.pipeline.claim import claim_start\n"
        f"connect({cluster.address!r})\n"
        "with claim_start('theirs'): print('claimed', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "claimed\n"
    with pytest.raises(PipelineExists), claim_start("theirs"):
        pass
    process.kill()
    process.wait()

    def free():
        with contextlib.suppress(PipelineExists), claim_start("theirs"):
            return True
        return False

    wait_for(free, "the claim of a process that was killed")


def test_drain_is_unknown_while_the_control_store_is_silent(cluster):
    """It is the last test of the cluster, whose only slice is drained."""
    [node] = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("TPU")]
    busy = ray.remote(num_cpus=0, resources={"TPU": 1})(_Claim).remote()  # An idle node would leave at once.
    ray.get(busy.__ray_ready__.remote())
    assert find_drain_s([node]) is None
    drain(cluster, node, 1000)
    assert 900 < wait_for(lambda: find_drain_s([node]), "the drain") < 1000
    with stop_process(cluster, "gcs_server"):
        start = time.monotonic()
        assert find_drain_s([node], timeout_s=0.5) is None
        assert time.monotonic() - start < 5
    assert wait_for(lambda: find_drain_s([node]), "the control store")
