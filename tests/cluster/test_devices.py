"""Chips that another process has: files stand for them, which real processes hold open."""

import subprocess
import sys
import threading
import time

import pytest

from cluster.errors import ChipsBusy, OtherHostGone, WrongHost
from cluster.gang.devices import classify_start_failure, wait_for_chips
from cluster.gang.protocol import DeviceError
from cluster.gang.watch import find_culprit

HOLD = "import sys, time; held = open(sys.argv[1]); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def chip(tmp_path):
    path = tmp_path / "vfio0"
    path.touch()
    return path


@pytest.fixture
def holder(chip):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(chip)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def free(chip, timeout_s):
    return wait_for_chips(timeout_s, [str(chip.parent / "vfio[0-9]*")], str(chip.parent / "lockfile"))


def test_a_killed_process_s_chips_are_waited_for_and_its_lock_removed(chip, holder):
    lock = chip.parent / "lockfile"
    lock.touch()

    def kill():
        holder.kill()
        holder.wait()

    start = time.monotonic()
    threading.Timer(0.5, kill).start()
    free(chip, 30)
    assert time.monotonic() - start > 0.4
    assert not lock.exists()


def test_holder_of_the_chips_is_named(chip, holder):
    with pytest.raises(ChipsBusy, match=rf"process {holder.pid} \({sys.executable} -c .*{chip}"):
        free(chip, 0.2)


def test_a_lock_that_is_held_stays(chip):
    lock = chip.parent / "lockfile"
    lock.touch()
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        free(chip, 1)
        assert lock.exists()
    finally:
        process.kill()
        process.wait()


def test_a_machine_without_chips_is_free(tmp_path):
    free(tmp_path / "vfio0", 0)


@pytest.mark.parametrize(
    ("message", "kind", "advice"),
    [
        (
            "FAILED_PRECONDITION: TPU initialization failed: open(/dev/vfio/0): Device or resource busy: Device or "
            "resource busy; Couldn't open iommu group /dev/vfio/0",
            ChipsBusy,
            "another process has the TPU of host 3",
        ),
        (
            "UNKNOWN: TPU initialization failed: open(/dev/accel3): Operation not permitted: Operation not permitted; "
            "Couldn't open device: /dev/accel3",
            ChipsBusy,
            "another process",
        ),
        (
            "ABORTED: The TPU is already in use by process with pid 5130. Not attempting to load libtpu.so",
            ChipsBusy,
            "pid 5130",
        ),
        ("UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Permission denied", WrongHost, "--privileged"),
        (
            "UNKNOWN: TPU initialization failed: Invalid --2a886c8_slice_builder_worker_addresses specified. Expected "
            "4 worker addresses, got 1.",
            WrongHost,
            "all of them must start together",
        ),
        ("INTERNAL: something new", WrongHost, "see the host's log"),
        (
            "DEADLINE_EXCEEDED: Barrier timed out. Id: PjRT_Client_Connect::0. # of tasks that reached it: 1/2.",
            OtherHostGone,
            "another host of its slice has failed or is missing",
        ),
    ],
)
def test_causes_of_a_failed_start_are_told_apart_and_only_busy_chips_are_tried_again(message, kind, advice):
    error = RuntimeError(f"Unable to initialize backend 'tpu': {message} (set JAX_PLATFORMS='')")
    failure = classify_start_failure("host 3", error)
    assert type(failure) is kind
    assert advice in str(failure)


def test_of_several_hosts_the_one_whose_error_speaks_of_no_other_is_named():
    waited = classify_start_failure("host 0", RuntimeError("DEADLINE_EXCEEDED: Barrier timed out"))
    missed, broken = DeviceError("Gloo: Connection closed by peer"), DeviceError("INTERNAL: core halted")
    assert find_culprit({0: waited, 1: ChipsBusy("host 1")}) == 1
    assert find_culprit({0: missed, 2: broken, 1: broken}) == 2  # In the order in which they came.
    assert find_culprit({1: missed, 0: missed}) == 1
