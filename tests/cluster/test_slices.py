"""Slices at work, on real Ray nodes with real processes."""

import threading
import time

import psutil
import pytest
import ray

from cluster.errors import CallFailed, SliceLost, SliceStartTimeout
from cluster.gang.protocol import RemoteError, Timeouts
from cluster.gang.slice import Slice
from cluster.inventory import list_slices
from cluster.slice_spec import SliceSpec
from tests.cluster.conftest import ONE_HOST, TWO_HOSTS
from tests.cluster.host_classes import SmallHost, Unbuildable


@pytest.fixture(scope="module")
def two(cluster):
    with Slice(TWO_HOSTS, SmallHost, "salve", name="low/0") as running:
        yield running


def test_hosts_stand_in_the_order_in_which_jax_counts_them(two):
    """On a TPU, JAX's order may differ from that of the worker ids; see `_emulate_joined`."""
    by_id = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    assert [by_id[host.node_id]["ray.io/tpu-worker-id"] for host in two.hosts] == ["1", "0"]
    assert len(set(two.pids)) == 2
    assert list(two.start_s) == ["placed", "started", "joined", "built"]
    assert two.call("place").value == (0, 2, two.pids[0])
    assert two.call("psum", 1.0).value == (2, 4, 1 + 1 + 2 + 2)  # Each host adds value + process on two devices.
    listening = {c.laddr.ip for pid in two.pids for c in psutil.Process(pid).net_connections("tcp") if not c.raddr}
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_calls_are_in_lockstep_and_keep_the_object(two):
    assert [two.call("count").value for _ in range(3)] == [1, 2, 3]
    assert two.call("count", lane="side").value == 4  # It is the same object.


def test_progress_is_seen_while_a_call_runs(two):
    seen = []
    assert two.call("slow", 6, 0.2, on_progress=lambda step: seen.append((step, time.monotonic()))).value == "done"
    assert seen[-1][0] == (6, 6)
    assert len(seen) >= 3
    assert seen[-1][1] - seen[0][1] > 0.4  # They came while it ran.


def test_side_work_runs_beside_a_call(two):
    ended = {}

    def call():
        two.call("slow", 20, 0.2)
        ended["call"] = time.monotonic()

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    two.call("place", lane="side")
    ended["side"] = time.monotonic()
    thread.join()
    assert ended["side"] < ended["call"] - 0.5


def test_a_payload_passes_by_reference_and_outlives_its_slice(cluster, two):
    with Slice(ONE_HOST, SmallHost, name="encoder/0") as encoder:
        value, payload = encoder.call("make", 1000)
        side = encoder.call("make", 10, lane="side")
    assert value == {"made": 1000}
    assert isinstance(payload, ray.ObjectRef)
    assert two.call("total", payload, 1.0).value == sum(range(1000)) + 1
    assert two.call("total", side.payload, 0.0, lane="side").value == 45


def test_an_exception_on_every_host_leaves_the_slice_alive(two):
    before = two.pids
    with pytest.raises(CallFailed, match=r"low/0: fail .*ValueError\('poison on 0'\)") as raised:
        two.call("fail", (0, 1))
    assert isinstance(raised.value.__cause__, ValueError)
    assert "in fail" in raised.value.__cause__.__notes__[0]  # The note has the traceback on the host.
    with pytest.raises(CallFailed, match="OddError") as raised:
        two.call("fail_oddly")
    assert isinstance(raised.value.__cause__, RemoteError)
    with pytest.raises(CallFailed, match="no_such_method"):
        two.call("no_such_method", lane="side")
    assert two.call("place").value[2] == before[0]


def test_slice_says_that_it_is_emulated_and_who_holds_it(two):
    assert two.emulated
    assert "low/0 on emulated v5p-16" in two.describe()
    slices = {s.name: s for s in list_slices()}
    assert slices["two"].holder == "low/0"
    assert slices["two"].emulated
    assert slices["two"].spec.topology == TWO_HOSTS.topology
    assert slices["one-a"].holder is None
    assert [host.devices for host in slices["two"].hosts] == [2, 2]


def test_a_busy_slice_is_not_shared(two):
    with pytest.raises(SliceStartTimeout, match=r"low/1: .*v5p-16 .*two: .*low/0"):
        Slice(TWO_HOSTS, SmallHost, name="low/1", timeouts=Timeouts(place_s=1))
    with pytest.raises(SliceStartTimeout, match=r"v6e-16.*v5p-16, v6e-1"):
        Slice(SliceSpec("v6e-16"), SmallHost, name="high/0", timeouts=Timeouts(place_s=0.5))


def test_a_host_that_cannot_be_built_leaves_nothing(cluster):
    with pytest.raises(CallFailed, match=r"build .*RuntimeError\('no weights here'\)"):
        Slice(ONE_HOST, Unbuildable, name="encoder/0")
    assert not {s.holder for s in list_slices() if s.pod_type == "v6e-1"} - {None}


def test_a_closed_slice_says_so(cluster):
    running = Slice(ONE_HOST, SmallHost, name="encoder/0")
    running.check()
    running.close()
    running.close()
    for use in (lambda: running.call("count"), running.check):
        with pytest.raises(SliceLost, match="encoder/0"):
            use()
