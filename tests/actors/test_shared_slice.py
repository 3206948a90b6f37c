"""Two requests share the experts' slice of a real pipeline; one of them is cancelled, and goes on later."""

import asyncio
import dataclasses
import time

import imageio.v3 as iio
import numpy as np
import pytest

from actors.payloads import unpack
from actors.pipeline import Pipeline
from actors.pools import deploy, shut_down
from actors.settings import PipelineSettings
from actors.snapshots import Snapshots
from cluster.connect import connect, leave
from cluster.emulated import EmulatedCluster
from cluster.layout import Layout
from tests.conftest import PHOTO
from wan_tpu import GenerationRequest
from wan_tpu.data import Video
from wan_tpu.expert import STAGES, TOGETHER

KIND = "wan2.2-i2v-a14b"
SECONDS = 150
STEPS = 120  # of 40 ms each at least, for two: long enough for both to meet
LAYOUT = Layout.parse(
    """
emulate: {devices_per_host: 1}
pools:
  ends: {stages: [encoder, decoder], slice: v6e-1}
  experts: {stages: [denoise_high, denoise_low], slice: v6e-1, batch: 2}
""",
    "the test's layout",
    STAGES,
    TOGETHER,
)
REQUESTS = {
    name: GenerationRequest(prompt=prompt, image=PHOTO, height=64, width=64, frames=9, steps=STEPS, seed=seed)
    for name, prompt, seed in (("cat", "A cat looks into the camera", 1), ("dog", "A dog runs", 2))
}


@pytest.fixture(scope="module")
def settings(checkpoint, tmp_path_factory):
    return PipelineSettings(
        str(checkpoint(KIND)), str(tmp_path_factory.mktemp("snapshots")), dtype="float32", snapshot_every=10
    )


@pytest.fixture(scope="module")
def running(settings, tmp_path_factory):
    with EmulatedCluster.start(LAYOUT.emulated_slices(), folder=tmp_path_factory.mktemp("cluster")) as cluster:
        connect(cluster.address)
        try:
            deploy(LAYOUT, settings)
            yield
            shut_down(settings.name)
        finally:
            leave()


@pytest.fixture(scope="module")
def alone(pipeline):
    """Latents after each step and pixels of each request, made by one process."""
    found = {}
    for name, request in REQUESTS.items():
        latents = []
        video = pipeline(KIND).generate(request, on_step=lambda event, latents=latents: latents.append(event.latents))
        found[name] = latents, video.pixels
    return found


def pixels(folder, mp4):
    path = folder / "read.mp4"
    path.write_bytes(mp4)
    return iio.imread(path, plugin="FFMPEG").astype(np.float32) / 255


def test_two_requests_share_a_slice(running, settings, alone, tmp_path):
    spans = {name: [] for name in REQUESTS}
    snapshot = []

    async def both():
        pipeline = Pipeline(LAYOUT, settings)

        def start(name):
            return asyncio.create_task(
                pipeline.generate(REQUESTS[name], id=name, on_event=spans[name].append), name=name
            )

        cat, dog = start("cat"), start("dog")
        until = time.monotonic() + SECONDS
        while len(shared(spans)) < 30:
            assert time.monotonic() < until and not cat.done() and not dog.done(), {n: len(s) for n, s in spans.items()}
            await asyncio.sleep(0.02)
        dog.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dog
        done = len(spans["dog"])
        while any(key.startswith("dog ") for key in await pipeline.call("denoise_high", stream=False).held.remote()):
            await asyncio.sleep(0.1)  # its last snapshot is still being written
        [kept] = Snapshots(settings.snapshots).names("dog")
        name, _, step = kept.removesuffix(".safetensors").rpartition(".")
        snapshot.append((int(step), unpack(Snapshots(settings.snapshots).load(name, int(step))).latents))
        videos = {"cat": await cat, "dog": await start("dog")}
        pipeline.close()
        return done, videos

    done, videos = asyncio.run(asyncio.wait_for(both(), 2 * SECONDS))
    # Each has its own steps, in order; those of the one that was cancelled go on from its snapshot.
    computed = {name: [s.step for s in spans[name] if s.step is not None] for name in spans}
    assert computed["cat"] == list(range(1, STEPS + 1))
    step, latents = snapshot[0]
    first = [s.step for s in spans["dog"][:done] if s.step is not None]
    assert first == list(range(1, len(first) + 1))
    assert computed["dog"][len(first) :] == list(range(step + 1, STEPS + 1))
    # Steps of both ran at once, at different places, on one slice.
    together = shared(spans)
    assert len({a.slice for pair in together for a in pair}) == 1
    # 1e-4: float32 sums in another order, over all steps and both experts
    expected = alone["dog"][0][step - 1]
    assert np.abs(latents - expected).max() <= 1e-4 * np.abs(expected).max()
    for name, video in videos.items():
        reference = Video(alone[name][1], 16).save(tmp_path / f"{name}.mp4").read_bytes()
        # The mean: where a value is rounded the other way, the codec writes a few others too.
        assert np.abs(pixels(tmp_path, video) - pixels(tmp_path, reference)).mean() <= 1e-4
    assert np.abs(pixels(tmp_path, videos["cat"]) - pixels(tmp_path, videos["dog"])).mean() > 0.01


def test_nobody_joins_when_another_shape_waits(running, settings):
    short = {name: dataclasses.replace(request, steps=20) for name, request in REQUESTS.items()}
    spans = {name: [] for name in ("a", "small", "late")}

    async def three():
        pipeline = Pipeline(LAYOUT, settings)
        small = dataclasses.replace(short["dog"], height=32)
        asked = {"a": dataclasses.replace(short["cat"], steps=600), "small": small, "late": short["dog"]}
        tasks = {}
        for name, request in asked.items():
            tasks[name] = asyncio.create_task(pipeline.generate(request, id=name, on_event=spans[name].append))
            until = time.monotonic() + SECONDS
            while not any(s.stage == "denoise_high" and (s.step or name != "a") for s in spans[name]):
                assert time.monotonic() < until and not tasks["a"].done(), f"{name} is not at the experts in time"
                await asyncio.sleep(0.02)
        videos = await asyncio.gather(*tasks.values())
        pipeline.close()
        return videos

    videos = asyncio.run(asyncio.wait_for(three(), 2 * SECONDS))
    assert all(video[4:8] == b"ftyp" for video in videos)
    steps = {name: [s for s in found if s.step is not None] for name, found in spans.items() if found}
    # There was room beside `a`, but another shape waited already: it comes first, then who came later.
    assert steps["a"][-1].end_s <= steps["small"][0].end_s
    assert steps["small"][-1].end_s <= steps["late"][0].end_s


def shared(spans):
    """Return pairs of the two requests' steps that were one call."""
    cats, dogs = ({s.start_s: s for s in spans[name] if s.step is not None} for name in ("cat", "dog"))
    return [(cats[start], dogs[start]) for start in sorted(set(cats) & set(dogs))]
