"""Two requests share the experts' slice of a real pipeline; one of them is cancelled, and goes on later."""

import asyncio
import dataclasses
import time

import imageio.v3 as iio
import numpy as np
import pytest

from actors.api.engine import LastingPipeline
from actors.payloads import unpack
from actors.pipeline import Pipeline
from actors.pools import deploy, shut_down
from actors.settings import About, PipelineSettings
from actors.snapshots import Snapshots
from cluster.connect import connect, leave
from cluster.emulated import EmulatedCluster
from cluster.inventory import slices_found
from cluster.layout import Layout
from tests.cluster.conftest import drain
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
  experts: {stages: [denoise_high, denoise_low], slice: v6e-4, batch: 2, replicas: {min: 1, max: 2}}
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
        str(checkpoint(KIND)),
        str(tmp_path_factory.mktemp("snapshots")),
        dtype="float32",
        snapshot_every=10,
        scale_up_s=3600,
    )  # the second slice of the experts is for when the first is taken away


@pytest.fixture(scope="module")
def running(settings, tmp_path_factory):
    with EmulatedCluster.start(LAYOUT.emulated_slices(), folder=tmp_path_factory.mktemp("cluster")) as cluster:
        connect(cluster.address)
        try:
            deploy(LAYOUT, settings)
            yield cluster
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


def test_an_urgent_request_overtakes_a_long_one_in_the_middle(running, settings):
    """It is of another shape, so it can't join: the long one holds still after the step that runs."""
    long = dataclasses.replace(REQUESTS["cat"], steps=60)
    urgent = dataclasses.replace(REQUESTS["dog"], steps=8, height=32)

    async def both(overtake):
        pipeline, spans, videos = Pipeline(LAYOUT, settings), {"long": [], "urgent": []}, {}

        def start(name, request, priority=0):
            made = pipeline.generate(request, id=name, on_event=spans[name].append, priority=priority)
            return asyncio.create_task(made)

        work = start("long", long)
        while overtake and sum(s.step is not None for s in spans["long"]) < 5:
            await asyncio.sleep(0.01)
        videos["long"] = work if overtake else await work
        videos["urgent"] = await start("urgent", urgent, 3)
        assert not overtake or not work.done()
        videos["long"] = await work
        pipeline.close()
        return videos, {name: [s for s in found if s.step is not None] for name, found in spans.items()}

    expected, _ = asyncio.run(asyncio.wait_for(both(overtake=False), SECONDS))
    videos, steps = asyncio.run(asyncio.wait_for(both(overtake=True), SECONDS))
    assert videos == expected  # bit for bit
    assert [s.step for s in steps["long"]] == list(range(1, 61))
    assert [s.step for s in steps["urgent"]] == list(range(1, 9))
    begun, ended = steps["urgent"][0].start_s, steps["urgent"][-1].end_s
    before = [s for s in steps["long"] if s.end_s <= begun]
    after = [s for s in steps["long"] if s.start_s >= ended]
    assert before and after
    assert len(before) + len(after) == 60  # none ran meanwhile
    assert {s.slice for s in steps["long"]} == {s.slice for s in steps["urgent"]}


def test_what_replicas_have_compiled_is_told_once(running, settings):
    async def ask():
        request = dataclasses.replace(REQUESTS["cat"], steps=2)
        pipeline = Pipeline(LAYOUT, settings)
        await pipeline.generate(request, id="compiles")
        pipeline.close()
        engine = LastingPipeline(About(LAYOUT, settings, True))
        return await engine.compiled(), await engine.compiled()

    found, again = asyncio.run(asyncio.wait_for(ask(), SECONDS))
    assert again == []
    programs = {(one.pool, one.program.split()[0]) for one in found}
    assert {("experts", "denoise"), ("experts", "text"), ("ends", "text_encoder")} <= programs
    assert all(0 < one.seconds < SECONDS for one in found)


@pytest.mark.long
def test_a_drained_slice_hands_over_both(running, settings, tmp_path):
    spans = {name: [] for name in REQUESTS}
    long = {name: dataclasses.replace(request, steps=600) for name, request in REQUESTS.items()}

    async def make(names, on_pair):
        pipeline = Pipeline(LAYOUT, settings)
        tasks = {}
        for name in names:
            tasks[name] = asyncio.create_task(pipeline.generate(long[name], id=name, on_event=spans[name].append))
        while len(shared(spans)) < on_pair:
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in tasks.values()), {n: len(s) for n, s in spans.items()}
        if on_pair:
            [left] = [s for s in slices_found() if s.holder is not None and s.holder.startswith("experts/")]
            await asyncio.to_thread(drain, running, left.hosts[0].node_id, 8)
        videos = {name: await task for name, task in tasks.items()}
        pipeline.close()
        return videos

    moved = asyncio.run(asyncio.wait_for(make(("cat", "dog"), 20), 2 * SECONDS))
    for name, found in spans.items():
        computed = [s for s in found if s.step is not None]
        assert [s.step for s in computed] == list(range(1, 601))  # none twice, none left out
        assert len({s.slice for s in computed}) == 2, f"{name} was done before it could be moved"
    for found in spans.values():
        found.clear()
    alone = asyncio.run(asyncio.wait_for(make(("cat",), 0), SECONDS))
    # 600 steps of float32 sums in another order, then the codec: 4e-4 seen; dog and cat are 0.1 apart.
    assert np.abs(pixels(tmp_path, moved["cat"]) - pixels(tmp_path, alone["cat"])).mean() <= 1e-3


def shared(spans):
    """Return pairs of the two requests' steps that were one call."""
    cats, dogs = ({s.start_s: s for s in spans[name] if s.step is not None} for name in ("cat", "dog"))
    return [(cats[start], dogs[start]) for start in sorted(set(cats) & set(dogs))]
