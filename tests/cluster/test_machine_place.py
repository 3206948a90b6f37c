"""Machines whose own place in a TPU slice isn't that of their node's labels are named."""

import pytest

from cluster.errors import WrongHost
from cluster.gang.machine_place import MachinePlace, check_machine_places, read_machine_place
from cluster.gang.protocol import HostPlace

HOSTS = [HostPlace(worker_id, 3, "a-slice", f"node-{worker_id}", f"10.0.0.{worker_id}") for worker_id in range(3)]
NAMES = ("t-0", "t-1", "t-2")


def test_machines_in_their_places_and_those_that_say_nothing_are_fine():
    check_machine_places(HOSTS, [MachinePlace(), MachinePlace(1), MachinePlace(2, NAMES)])


@pytest.mark.parametrize(
    ("worker_id", "names", "message"),
    [
        (
            0,
            NAMES,
            r"host 1 of 3 .* at 10.0.0.1\) is worker 0 of .*TPU_WORKER_ID.* worker 1 according to .*; start Ray",
        ),
        (
            1,
            ("u-0", "t-1", "u-2"),
            r"host 1 of 3 .*doesn't belong to the same TPU slice as host 0 of 3 .*: .* u-0,t-1,u-2, .*t-0",
        ),
        (
            1,
            ("t-0", "t-1"),
            "host 1 of 3 .* is one of 2 hosts of its TPU slice .* one of 3 according to its node's label",
        ),
    ],
)
def test_machine_in_another_place_is_named(worker_id, names, message):
    with pytest.raises(WrongHost, match=message):
        check_machine_places(HOSTS, [MachinePlace(0, NAMES), MachinePlace(worker_id, names), MachinePlace(2, NAMES)])


def test_place_is_read_from_the_variables_of_gke(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0,t-1,t-2")
    assert read_machine_place(metadata=False) == MachinePlace(2, NAMES)
    monkeypatch.delenv("TPU_WORKER_ID")
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES")
    assert read_machine_place(metadata=False) == MachinePlace()
