"""Functions that make the gate's videos: in one process, through files, and on emulated slices."""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import imageio.v3 as iio
import numpy as np

from actors.pipeline.driver import PipelineDriver
from actors.pipeline.pools import deploy
from actors.pipeline_spec import PipelineSettings, PipelineSpec
from cluster.connect import connect, leave
from cluster.emulation.cluster import EmulatedCluster, list_emulated_slices
from cluster.layout import Layout
from wan_tpu import GenerationRequest, load_pipeline
from wan_tpu.data import Conditioning, DenoiseState, load_value, save_value
from wan_tpu.families import open_spec

from .gate import Generate

LAYOUT = "emulated-demo"  # Four slices with five hosts.


@contextlib.contextmanager
def in_one_process(checkpoint: Path, dtype: str) -> Iterator[Generate]:
    """Yield a function that makes videos with the pipeline of one process."""
    pipeline = load_pipeline(checkpoint, dtype=dtype, mesh=(1, 1, 1))
    yield lambda request: pipeline.generate(request).pixels


@contextlib.contextmanager
def through_files(checkpoint: Path, dtype: str) -> Iterator[Generate]:
    """Yield a function that makes videos stage by stage, with a file between any two stages."""
    pipeline = load_pipeline(checkpoint, dtype=dtype, mesh=(1, 1, 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "value.safetensors"

        def generate(request: GenerationRequest) -> np.ndarray:
            plan = pipeline.plan(request)
            save_value(pipeline.encode(plan), path)
            conditioning, _ = load_value(Conditioning, path)
            state = pipeline.initial_state(plan)
            for expert in plan.experts:
                save_value(pipeline.denoise(plan, conditioning, state, stop=expert.stop), path)
                state, _ = load_value(DenoiseState, path)
            return np.concatenate(list(pipeline.decode(state.latents)))

        yield generate


@contextlib.contextmanager
def on_slices(checkpoint: Path, dtype: str) -> Iterator[Generate]:
    """Yield a function that makes videos on emulated slices of a Ray cluster; frames are those of the mp4."""
    layout = Layout.load(LAYOUT)
    with (
        tempfile.TemporaryDirectory(prefix="wan-gate-") as folder,
        EmulatedCluster.start(
            list_emulated_slices(layout), folder=Path(folder) / "cluster", imports="actors.imported"
        ) as cluster,
        asyncio.Runner() as runner,
    ):
        connect(cluster.address)
        settings = PipelineSettings(checkpoint=str(checkpoint), snapshots=f"{folder}/snapshots", dtype=dtype)
        spec = PipelineSpec(layout, settings, model=open_spec(checkpoint), lasting=False)
        deploy(spec)
        driver = PipelineDriver(spec)
        count = 0

        def generate(request: GenerationRequest) -> np.ndarray:
            nonlocal count
            count += 1
            video = runner.run(driver.generate(spec.model.plan(request), id=f"gate-{count}"))
            runner.run(driver.forget(f"gate-{count}"))
            return iio.imread(video.mp4, extension=".mp4", plugin="FFMPEG").astype(np.float32) / 255

        try:
            yield generate
        finally:
            driver.close()
            leave()


GENERATORS: dict[str, Callable[[Path, str], contextlib.AbstractContextManager[Generate]]] = {
    "process": in_one_process,
    "files": through_files,
    "slices": on_slices,
}
