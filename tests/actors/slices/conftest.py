"""Shared by the tests of simulated slices: the cluster that they lie on."""

import pytest

from cluster.emulation.cluster import EmulatedCluster, EmulatedSlice, Settings
from cluster.slice_spec import SliceSpec


@pytest.fixture(scope="package")
def three_slices(tmp_path_factory, forks):
    """An emulated cluster of three slices of one host each. A module joins it, and leaves it as it was."""
    slices = [EmulatedSlice(f"v6e-1-{i}", SliceSpec("v6e-1")) for i in range(3)]
    folder = tmp_path_factory.mktemp("three-slices")
    with EmulatedCluster.start(slices, Settings(head_store_mib=1024), folder=folder, forks=forks) as cluster:
        yield cluster
