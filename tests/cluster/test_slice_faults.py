"""What breaks a slice: real kills of real processes and nodes. Nothing may be left behind, and the error says which."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray

from cluster.errors import CallFailed, ChipsBusy, DeviceFailed, SliceError, SliceLost, SliceStartTimeout, WrongHost
from cluster.gang import placement
from cluster.gang import slice as gang
from cluster.gang.host_actor import HostActor
from cluster.gang.protocol import HostPlace, Outcome, Timeouts
from cluster.gang.slice import Slice, take
from cluster.inventory import list_slices
from tests.cluster.conftest import CHIPS, ONE_HOST, TWO_HOSTS
from tests.cluster.host_classes import BusyAtFirst, OddHost, SmallHost, StopsOneHost
from tests.waiting import wait_for

QUICK = Timeouts(heartbeat_s=3, grace_s=1.5)


def lost_in(running, *call):
    """Return what `SliceLost` said, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(SliceLost) as raised:
        running.call(*call)
    return raised.value, time.monotonic() - start


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_killed_in_a_call(rank, cluster, all_free):
    """The second is worker 0, at which all others are joined: JAX ends them, and their end may be noticed first."""
    running = Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK)
    assert running.hosts[rank].worker_id == 1 - rank
    error, seconds = lost_in(running, "kill_itself", rank)
    assert f"low/0: in kill_itself: {running.hosts[rank]}"[:-1] in str(error)
    assert f"host {1 - rank} of 2" in str(error) and f"pid {running.pids[rank]}) died" in str(error)
    assert seconds < 40
    all_free(*running.pids)  # The other host, which slept, is gone as well.
    with pytest.raises(SliceLost):
        running.call("count")


@pytest.mark.thorough
def test_worker_0_that_is_hung_is_named_where_another_one_dies(cluster, all_free):
    running = Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK)
    os.kill(running.pids[1], signal.SIGSTOP)  # As its machine without power: that is noticed last.
    error, _ = lost_in(running, "kill_itself", 0)
    assert f"{running.hosts[1]}"[:-1] in str(error) and "is hung" in str(error)
    all_free(*running.pids)


def test_hosts_that_have_not_joined_are_told_from_those_that_have(cluster, all_free, monkeypatch):
    start, starting = Slice._start_hosts, list[Slice]()

    def remember(self, placement):
        starting.append(self)
        return start(self, placement)

    def stop_worker_1(hosts, machines):
        os.kill(starting[0].pids[1], signal.SIGSTOP)

    monkeypatch.setattr(Slice, "_start_hosts", remember)
    monkeypatch.setattr(gang, "check_machine_places", stop_worker_1)
    message = r"join .*\b2 s; .*host 0 of 2 \([^;]*\), [^;]*; host 1 of 2 \([^;]*\); --timeout join="
    with pytest.raises(SliceStartTimeout, match=message):
        Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=dataclasses.replace(QUICK, join_s=2))
    all_free()


@pytest.mark.thorough
def test_hosts_that_jax_counts_as_the_same_process_are_named(cluster, all_free, monkeypatch):
    run_phase = Slice._run_phase

    def count_as_one(self, phase, *args, **options):
        ended = run_phase(self, phase, *args, **options)
        return [Outcome(0)] * 2 if phase == "join" else ended

    monkeypatch.setattr(Slice, "_run_phase", count_as_one)
    with pytest.raises(WrongHost, match=r"host 0 of 2 .* is 0, host 1 of 2 .* is 0.*CLOUD_TPU_TASK"):
        Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK)
    all_free()


def test_hung_host_is_named_where_another_one_misses_it(cluster, all_free):
    """A machine without power is silent too; the others fail at once, and Ray notices last."""
    running = Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK)
    os.kill(running.pids[0], signal.SIGSTOP)
    error, seconds = lost_in(running, "miss_a_peer", 1)
    assert f"{running.hosts[0]}"[:-1] in str(error)
    assert "no heartbeat for 3 s" in str(error)
    assert seconds < 40
    all_free(*running.pids)


def test_call_that_reports_a_longer_wait_is_waited_for_and_no_longer_than_that(cluster, all_free):
    """A compiler may take a hundred times as long as the program that it compiles."""
    running = Slice(ONE_HOST, SmallHost, name="low/0", timeouts=QUICK)
    assert running.call("compiles", 600, 3, 0, timeout_s=2).value == "done"
    assert running.call("slow", 15, 0.2, timeout_s=2).value == "done"  # It reports progress all the time.
    with pytest.raises(DeviceFailed, match=r"compiles.*host 0 of 1 .*\b2 s"):
        running.call("compiles", 600, 0, 600, timeout_s=2)
    all_free(*running.pids)


def test_a_slice_that_comes_late_is_waited_for(cluster, monkeypatch):
    monkeypatch.setattr(placement, "STATUS_PAUSE_S", 0.2)
    notices, slices = [], []
    with Slice(ONE_HOST, SmallHost, name="encoder/0"), Slice(ONE_HOST, SmallHost, name="low/0") as first:

        def take():
            slices.append(Slice(ONE_HOST, SmallHost, name="low/1", on_status=notices.append))

        waiting = threading.Thread(target=take)
        waiting.start()
        wait_for(lambda: len(notices) > 1, "a word on what is waited for")
        assert "waits for a free v6e-1" in notices[-1] and ": taken by low/0" in notices[-1]
        first.close()
        waiting.join(60)
    with slices[0] as second:
        assert second.call("count").value == 1


def test_a_slice_whose_chips_another_process_has_is_tried_again(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(gang, "BUSY_PAUSE_S", 0.1)
    notices = []
    patient = Timeouts(chips_s=300)
    with take(ONE_HOST, BusyAtFirst, tmp_path / "made", name="encoder/0", timeouts=patient, on_status=notices.append):
        [notice] = notices
        assert re.fullmatch(r"process 7 has the chips; tried again in 0\.1 s, for (2\d\d|300) s more at most", notice)
    (tmp_path / "made").unlink()
    with pytest.raises(CallFailed, match="process 7"):
        take(ONE_HOST, BusyAtFirst, tmp_path / "made", name="encoder/0", timeouts=Timeouts(chips_s=0.05))


def test_hosts_that_are_not_alike_are_refused(cluster):
    with pytest.raises(SliceError, match=r"low/0: .*flags is 'of 0' on host 1 .* 'of 1' on host 0"):
        Slice(TWO_HOSTS, OddHost, name="low/0")
    assert not {s.holder for s in list_slices()} - {None}


def test_a_tpu_host_without_its_chips_computes_nothing():
    """JAX in this process has only the CPU, as it would if another process held the chips."""
    host = HostActor(HostPlace(0, 1, "one", "node", "127.0.0.1", chips=8))
    outcome, _ = host.build(SmallHost)
    assert isinstance(outcome.error, ChipsBusy)
    assert "has cpu, not the TPU" in str(outcome.error)


def test_a_host_that_does_not_start_is_named(cluster, all_free):
    with pytest.raises(SliceLost, match=r"low/0: .*\bbuild\b.*host 0 of 2 \(two, .*\b3 s"):
        Slice(TWO_HOSTS, StopsOneHost, 1, True, name="low/0", timeouts=QUICK)
    all_free()


@pytest.mark.thorough
def test_a_host_that_starts_too_slowly_is_named(cluster, all_free):
    late = dataclasses.replace(QUICK, build_s=1)
    with pytest.raises(SliceStartTimeout, match=r"build .*\b1 s\b.*host 0 of 2 \([^;]*\).*--timeout"):
        Slice(TWO_HOSTS, StopsOneHost, 1, False, name="low/0", timeouts=late)


def test_an_idle_slice_with_a_stopped_host_can_be_checked_and_closed(cluster, all_free):
    running = Slice(ONE_HOST, SmallHost, name="encoder/0", timeouts=QUICK)
    os.kill(running.pids[0], signal.SIGSTOP)
    with pytest.raises(SliceLost, match=r"check: host 0 of 1 .*\b3 s"):
        running.check()
    all_free(*running.pids)
    running = Slice(ONE_HOST, SmallHost, name="encoder/0", timeouts=QUICK)
    os.kill(running.pids[0], signal.SIGSTOP)
    running.close()
    all_free(*running.pids)


def test_an_exception_on_one_host_destroys_the_gang_unless_it_is_beside_the_lockstep(cluster, all_free):
    """One host may fail to read an adapter or a disk; no other host waits for it in a collective."""
    running = Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK)
    for rank, lane in ((0, "side"), (1, "side"), (1, "save"), (1, "network"), (1, "stream")):
        with pytest.raises(CallFailed, match=rf"low/0: fail .*host {1 - rank} of 2 .*poison on {rank}") as raised:
            running.call("fail", (rank,), lane=lane)
        assert isinstance(raised.value.__cause__, ValueError)
        assert running.call("fail", (), lane=lane).value == "fine"
    assert running.call("psum", 1.0).value == (2, 4, 6.0)
    error, _ = lost_in(running, "fail", (1,))
    assert f"{running.hosts[1]}"[:-1] in str(error)
    assert "ValueError: poison on 1" in str(error)
    assert isinstance(error.__cause__, ValueError)
    all_free(*running.pids)


@pytest.mark.thorough
def test_an_exception_on_one_host_while_the_other_waits_for_it(cluster, all_free):
    running = Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK)
    error, seconds = lost_in(running, "fail_then_hang", 0)
    assert "ValueError: left the others waiting" in str(error)
    assert f"{running.hosts[0]}"[:-1] in str(error)
    assert seconds < 40
    all_free(*running.pids)


def test_a_call_that_nobody_waits_for_any_more(cluster, all_free):
    running = Slice(ONE_HOST, SmallHost, name="encoder/0", timeouts=QUICK)

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.call("slow", 100, 0.2, on_progress=stop)
    with pytest.raises(SliceLost, match=r"encoder/0.*slow"):
        running.call("count")
    all_free(*running.pids)


@pytest.mark.thorough
def test_a_side_call_hears_why_the_slice_was_lost(cluster, all_free):
    running = Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK)
    errors = []

    def side():
        try:
            running.call("slow", 100, 0.5, lane="side")
        except SliceLost as error:
            errors.append(str(error))

    thread = threading.Thread(target=side)
    thread.start()
    time.sleep(0.5)
    error, _ = lost_in(running, "fail", (0,))
    thread.join(timeout=10)
    assert errors == [str(error)]
    all_free(*running.pids)


def test_a_killed_node_is_named_and_its_replacement_used(cluster, all_free):
    running = Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK)
    dead = next(host.node_id for host in running.hosts if host.worker_id == 1)
    threading.Timer(0.5, cluster.kill_host, ("two", 1)).start()
    error, seconds = lost_in(running, "slow", 100, 0.5)
    assert "host 1 of 2" in str(error)
    assert dead[:8] in str(error)
    assert seconds < 40
    wait_for(lambda: not alive(dead), "Ray has noticed")
    with pytest.raises(SliceStartTimeout, match=r"v5p-16.* two: host 1 of 2"):
        Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=Timeouts(place_s=1))
    replacement = cluster.add_host("two", 1)
    with Slice(TWO_HOSTS, SmallHost, name="low/0", timeouts=QUICK) as again:
        assert [host.node_id for host in again.hosts if host.worker_id == 1] == [replacement] != [dead]
        assert again.call("psum", 1.0).value == (2, 4, 6.0)
    all_free(*running.pids, *again.pids)


def alive(node_id):
    return {node["NodeID"]: node["Alive"] for node in ray.nodes()}.get(node_id, False)


LEADER = """
import sys, time
from cluster.connect import connect
from cluster.gang.slice import Slice, take
from tests.cluster.conftest import TWO_HOSTS
from tests.cluster.host_classes import StopsOneHost, SmallHost
connect(sys.argv[1])
running = Slice(TWO_HOSTS, SmallHost, name="low/0")
print(*running.pids, flush=True)
running.call("slow", 100, 0.5)
"""


@pytest.mark.thorough
def test_a_killed_driver_takes_its_slice_along(cluster, all_free):
    driver = subprocess.Popen(
        [sys.executable, "-c", LEADER, cluster.address], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    wait_for(lambda: ray.available_resources().get("TPU") == CHIPS - TWO_HOSTS.chips, "the slice is taken")
    driver.kill()
    driver.wait()
    all_free(*pids)


@ray.remote(num_cpus=0)
class Leader:
    """Like a Serve replica, it is a detached actor."""

    def start(self) -> tuple[int, ...]:
        self.slice = Slice(TWO_HOSTS, SmallHost, name="low/0")
        return os.getpid(), *self.slice.pids


def test_a_killed_leader_takes_its_slice_along(cluster, all_free):
    leader = Leader.options(lifetime="detached", name="leader").remote()
    pid, *hosts = ray.get(leader.start.remote(), timeout=60)
    os.kill(hosts[1], signal.SIGSTOP)  # This host can't end itself.
    os.kill(pid, signal.SIGKILL)
    all_free(*hosts)


def test_an_error_of_a_device_ends_the_gang(cluster, all_free):
    """All of its hosts (one) raised, so the lockstep is intact, but what the device holds is in doubt."""
    running = Slice(ONE_HOST, SmallHost, name="encoder/0", timeouts=QUICK)
    with pytest.raises(DeviceFailed, match=r"encoder/0: .*fail_on_device.*host 0 of 1 .*INTERNAL: CpuCallback error"):
        running.call("fail_on_device")
    with pytest.raises(SliceLost):
        running.call("count")
    all_free(*running.pids)
