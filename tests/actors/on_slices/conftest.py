"""One emulated cluster and one running pipeline for all tests of this folder."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import safetensors.numpy

from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy, shut_down
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from actors.reliability import ReliabilitySettings
from actors.slices.profiling import PORT
from cluster.connect import connect, leave
from cluster.emulation import ray_nodes
from cluster.emulation.cluster import EmulatedCluster, list_emulated_slices
from cluster.layout import Layout
from tests.actors.on_slices.running import Running, in_one_process
from tests.conftest import PHOTO, ROOT
from tests.waiting import wait_for
from wan_tpu import GenerationRequest
from wan_tpu.families import open_spec

# The shipped layout of the demo, and one slice more that `high` may take.
LAYOUT = ROOT / "cluster" / "layouts" / "emulated-demo.yaml"
HIGH = "  high:\n    stages: [denoise_high]\n    slice: v6e-4\n"
# 72 steps of the high expert, 128 of the low: 20 ms each on two idle cores, and long enough to be met in the middle.
REQUEST = GenerationRequest(
    prompt="A cat looks into the camera",
    negative_prompt="",  # The small tokenizer doesn't know all of Wan's.
    image=PHOTO,
    height=64,
    width=64,
    frames=9,
    steps=200,
    shift=5.0,
)
SHORT = dataclasses.replace(REQUEST, steps=100)
POISON = "☠"  # the tokenizer doesn't know it, and what stands for unknown words is broken in these weights


@pytest.fixture(scope="package")
def broken_checkpoint(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small A14B that turns a prompt with an unknown word into NaN."""
    folder = shutil.copytree(checkpoint("wan2.2-i2v-a14b"), tmp_path_factory.mktemp("broken") / "checkpoint")
    path = folder / "text_encoder" / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    weights["shared.weight"][2] = np.inf
    safetensors.numpy.save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="package")
def layout() -> Layout:
    text = LAYOUT.read_text()
    assert HIGH in text
    return Layout.parse(text.replace(HIGH, f"{HIGH}    replicas: {{min: 1, max: 2}}\n"), "tests")


@pytest.fixture(scope="package")
def settings(broken_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> PipelineSettings:
    return PipelineSettings(
        str(broken_checkpoint),
        str(tmp_path_factory.mktemp("snapshots")),
        dtype="float32",
        snapshot_every=20,
        scale_wait_s=20,
        scale_up_s=1,
        scale_down_s=3,
        scale_look_s=3,
        # The first loss without progress in between is forgiven, the second isn't.
        reliability=ReliabilitySettings(place_s=5, heartbeat_s=12, grace_s=4, stage_attempts=2),
    )


@pytest.fixture(scope="package")
def spec(layout: Layout, settings: PipelineSettings) -> PipelineSpec:
    return PipelineSpec(layout, settings, open_spec(settings.checkpoint), lasting=True)


@pytest.fixture(scope="package")
def profiler_port() -> Iterator[int]:
    """Where JAX's profiler listens in the hosts, outside of the range that sockets get a port from by chance."""
    with pytest.MonkeyPatch.context() as patch:
        port = 20_000 + os.getpid() % 10_000
        patch.setitem(ray_nodes.ENVIRONMENT, PORT, str(port))
        yield port


@pytest.fixture(scope="package")
def running(
    spec: PipelineSpec, profiler_port: int, forks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with EmulatedCluster.start(
        list_emulated_slices(spec.layout), folder=tmp_path_factory.mktemp("cluster"), forks=forks
    ) as cluster:
        connect(cluster.address)
        try:
            chips = ray.available_resources()["TPU"]
            messages: list[str] = []
            deploy(spec, on_status=messages.append)
            assert all(f"{pool.name}: " in messages[1] for pool in spec.layout.pools)
            running_pipeline = Running(cluster, spec.layout, PipelineDriver(spec))
            yield running_pipeline
            running_pipeline.close()
            shut_down(spec.settings.name)
            wait_for(lambda: ray.available_resources().get("TPU") == chips, "all chips are free")
            wait_for(lambda: not running_pipeline.all_hosts(), "no process of a host is left")
            wait_for(lambda: not any(map(running_pipeline.leaders, ("encoder", "high", "low", "decoder"))), "no leader")
        finally:
            leave()


@pytest.fixture(autouse=True)
def settle_afterwards(running: Running) -> Iterator[None]:
    """After each test every pool has its slices, no slice is shared, and nothing is held by nobody."""
    yield
    running.settle()


@pytest.fixture(scope="package")
def reference(broken_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, np.ndarray]]:
    """Starts the same request in one process, beside the cluster; returns what waits for its results."""
    return in_one_process(broken_checkpoint, SHORT, 2, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="package")
def undisturbed_video(running: Running) -> bytes:
    """The video of `REQUEST` when nothing happens."""
    return running.start("undisturbed", REQUEST).video()
