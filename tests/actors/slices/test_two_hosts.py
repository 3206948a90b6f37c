"""A slice of two hosts, as two real processes, computes what one process does."""

import os
import socket
import time

import numpy as np
import pytest

from tests.children import end, start_module
from tests.conftest import PHOTO
from tests.waiting import SECONDS

KIND = "wan2.2-i2v-a14b"


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """Results of 2 processes with 2 devices each, and of 1 process with 4."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {hosts: tmp_path_factory.mktemp(f"hosts{hosts}") for hosts in (1, 2)}
    # XLA takes as many threads as there are cores, but no fewer than devices, and some sums of a convolution are cut by
    # their number: NPROC makes it the same in both, and with it every bit.
    environment = os.environ | {"NPROC": "4"}
    workers, give_up = [], time.monotonic() + SECONDS
    try:
        for rank, hosts in ((0, 2), (1, 2), (0, 1)):
            flags = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={4 // hosts}"}
            workers.append(
                start_module(
                    "tests.actors.slices.host_process",
                    *(rank, hosts, port, checkpoint(KIND), PHOTO, folders[hosts]),
                    environment=environment | flags,
                    output=folders[hosts] / f"{rank}.log",
                )
            )
        for worker in workers:
            worker.join(max(0, give_up - time.monotonic()))
    finally:
        for worker in workers:
            end(worker)
    logs = [log.read_text()[-9000:] for folder in folders.values() for log in sorted(folder.glob("*.log"))]
    assert [worker.exitcode for worker in workers] == [0, 0, 0], "\n----\n".join(logs)
    return {(hosts, rank): np.load(folders[hosts] / f"{rank}.npz") for hosts, rank in ((2, 0), (2, 1), (1, 0))}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["latents", "pixels", "mp4"])
def test_two_hosts_make_the_video_of_one_bit_for_bit(runs, kind):
    expected = runs[1, 0][kind]
    assert expected.std() > 0.05
    for rank in (0, 1):
        assert np.array_equal(runs[2, rank][kind], expected), rank
