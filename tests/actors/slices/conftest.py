"""Shared by the tests of slices: the cluster that they lie on, and pipelines on it."""

import contextlib

import pytest

from actors.pipeline.pools import deploy, shut_down
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.connect import connect, leave
from cluster.emulation.cluster import EmulatedCluster, EmulatedSlice, Settings
from cluster.layout import Layout
from cluster.slice_spec import SliceSpec
from wan_tpu.families import open_spec


@pytest.fixture(scope="package")
def three_slices(tmp_path_factory, forks):
    """An emulated cluster of three slices of one host each. A module joins it, and leaves it as it was."""
    slices = [EmulatedSlice(f"v6e-1-{i}", SliceSpec("v6e-1")) for i in range(3)]
    folder = tmp_path_factory.mktemp("three-slices")
    with EmulatedCluster.start(slices, Settings(head_store_mib=1024), folder=folder, forks=forks) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def deployed(three_slices, tmp_path_factory):
    """A function that runs a checkpoint's pipeline on the slices, with pools as YAML, and gives its specification."""

    @contextlib.contextmanager
    def run(folder, pools, **settings):
        snapshots = str(tmp_path_factory.mktemp("snapshots"))
        chosen = PipelineSettings(str(folder), snapshots, dtype="float32", **settings)
        layout = Layout.parse(f"emulate: {{devices_per_host: 1}}\npools:\n{pools}", "the test's layout")
        spec = PipelineSpec(layout, chosen, open_spec(str(folder)), lasting=True)
        connect(three_slices.address)
        deploy(spec)
        yield spec
        shut_down(chosen.name)
        leave()

    return run
