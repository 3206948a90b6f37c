"""Videos that continue others, and videos of several segments, are watched while they are decoded."""

import asyncio

import pytest

from actors.api.worker.continued import continue_fragments
from actors.api.worker.fragments import Fragments
from actors.engine import Fragment
from actors.jobs.watching import begin_to_watch, list_fragments
from actors.jobs.work import WorkQueue
from tests.actors.api import serving
from tests.actors.api.serving import create, open_client, serve, wait_for_end, working
from tests.actors.api.test_watching import count_frames, decode_digests, list_stored_fragments, watching
from tests.actors.small_spec import SOUND_SPEC
from tests.waiting import wait_for
from tests.wan_tpu.test_media_continued import encode
from wan_tpu.media import video
from wan_tpu.storage.opening import open_storage

FPS = 24


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "frames").mkdir()
    return serving.DecodingEngine(tmp_path / "frames")


@pytest.fixture(scope="module")
def parts():
    """Return finished parts, and their fragments as they came."""
    return [encode(frames, FPS, seed=seed, hidden_frames=seed > 0) for seed, frames in enumerate((17, 34, 34))]


def test_segments_follow_each_other_and_a_lost_decoder_begins_the_video_again(http, settings, database, parts):
    jobs = [create(http).json()["id"] for _ in range(2)]
    for job in jobs:
        begin_to_watch(database, job)
    queue, storage = WorkQueue(database), open_storage(settings.storage)
    (source, _), (first, first_fragments), (second, second_fragments) = parts

    async def store(finished, add_segments):
        """Claim a job and store fragments; return their runs, and their names and contents."""
        job = queue.claim("worker")
        async with Fragments(queue, storage, job).storing() as fragments:
            await add_segments(await continue_fragments(finished, FPS, None, fragments))
            assert await fragments.finish()
        stored = list_fragments(database, job.id)
        assert [fragment.number for fragment in stored] == list(range(len(stored)))
        return {fragment.run for fragment in stored}, [storage.read(fragment.name) for fragment in stored]

    async def add(continued, contents, run=0):
        for index, content in enumerate(contents):
            continued.add(Fragment(run, index, content))
            await asyncio.sleep(0.05)  # It is stored meanwhile.

    async def lose_the_second_segment_s_decoder(continued):
        await add(continued, first_fragments)
        await continued.end_segment(first)
        await add(continued, second_fragments[:1])
        await add(continued, second_fragments, run=1)

    async def resume_and_stream_nothing(continued):
        await add(continued, second_fragments[:1])
        await continued.end_segment(second)

    runs, contents = asyncio.run(store([source], lose_the_second_segment_s_decoder))
    assert runs == {1} and len(contents) == 2 + 3 + 3
    resumed_runs, resumed_contents = asyncio.run(store([source, first], resume_and_stream_nothing))
    assert (resumed_runs, resumed_contents) == ({0}, contents)


def test_segments_that_can_not_follow_end_the_stream(http, settings, database, parts):
    begin_to_watch(database, create(http).json()["id"])
    queue, storage = WorkQueue(database), open_storage(settings.storage)

    async def store():
        async with Fragments(queue, storage, queue.claim("worker")).storing() as fragments:
            continued = await continue_fragments([parts[0][0]], FPS, None, fragments)
            await continued.end_segment(b"no video")
            continued.add(Fragment(0, 0, parts[1][1][0]))
            assert not await fragments.finish()
            assert await continue_fragments([b"no video"], FPS, None, fragments) is None

    asyncio.run(store())


@pytest.mark.parametrize(
    ("spec", "frames", "losses"), [(serving.SPEC, (25, 33), 1), (SOUND_SPEC, (22, 39), 0)], ids=["lost", "sound"]
)
def test_continued_video_brings_its_source_at_once_and_then_the_new_part(settings, engine, spec, frames, losses):
    engine.model, (before, after) = spec, frames
    with serve(settings, spec) as address, working(settings, engine), open_client(address) as http:
        engine.decoded.release(2)
        source = create(http, num_frames=before).json()["id"]
        assert wait_for_end(http, source)["status"] == "completed"
        engine.go.clear()
        engine.losses = losses
        body = {"prompt": "it goes on", "video": {"id": source}, "num_frames": after, "seed": 7}
        job = http.post("/v1/videos/extensions", json=body).raise_for_status().json()["id"]
        with watching(http, job) as (_, viewer):
            wait_for(lambda: len(list_stored_fragments(settings)) == 2 and viewer.received)
            wait_for(lambda: count_frames(viewer.received) == before)
            engine.go.set()
            engine.decoded.release(5)
            content, cut = viewer.end()
        assert not cut
        finished = http.get(f"/v1/videos/{job}/content").content
    assert decode_digests(content) == decode_digests(finished) and count_frames(content) == before + after - 1
    assert (b"mp4a" in content, b"mp4a" in finished) == (spec is SOUND_SPEC,) * 2


def test_continued_video_of_other_settings_is_cut_before_its_new_part(http, settings, engine, worker, monkeypatch):
    source = create(http).json()["id"]
    engine.decoded.release(1)
    assert wait_for_end(http, source)["status"] == "completed"
    monkeypatch.setattr(video, "H264", video.H264.replace("bframes=1", "bframes=0"))
    body = {"prompt": "it goes on", "video": {"id": source}, "num_frames": 17}
    job = http.post("/v1/videos/extensions", json=body).raise_for_status().json()["id"]
    with watching(http, job) as (_, viewer):
        wait_for(lambda: viewer.received)
        engine.decoded.release(1)
        received, cut = viewer.end()
    assert (count_frames(received), cut) == (9, True)
    assert wait_for_end(http, job)["status"] == "completed"
