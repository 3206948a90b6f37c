"""Videos of several segments are one job: each continues the one before, and none is made twice, whatever dies."""

import dataclasses
import io
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from actors.errors import RequestFailed
from tests.actors.api import serving
from tests.actors.api.serving import change_reliability, create, open_client, serve, wait_for_end, working
from tests.actors.api.test_extensions import content, packets, wait_for_video
from tests.actors.api.test_watching import list_frames, watching
from tests.actors.small_spec import SOUND_SPEC, SmallSpec
from tests.waiting import wait_for
from wan_tpu.media.reading import read_frame
from wan_tpu.media.video_content import VideoContent
from wan_tpu.request import Preset


@pytest.fixture
def http(settings, engine):
    with working(settings, engine), serve(settings) as address, open_client(address) as client:
        yield client


PROMPTS = ["[Close-up] it falls", "it lies there"]


def list_packets(files):
    return [packet for file in files for packet in packets(file)]


def test_each_segment_continues_the_one_before(http, engine):
    engine.warnings = ("the prompt was cut",)
    video = wait_for_video(http, create(http, seed=5, next_prompts=PROMPTS, priority=1))
    assert [(request.prompt, request.seed, request.hidden_frames) for request in engine.requests] == [
        ("a cat", 5, 0),
        (PROMPTS[0], 6, 1),
        (PROMPTS[1], 7, 1),
    ]
    segments = [engine.video(request) for request in engine.requests]
    assert engine.requests[0].image is None
    for before, request, frames in zip(segments[:-1], engine.requests[1:], (9, 8), strict=True):
        assert np.array_equal(np.asarray(request.image), np.asarray(read_frame(VideoContent(before), frames - 1)))
    assert packets(content(http, video)) == list_packets(segments)
    fields = {name: video[name] for name in ("next_prompts", "finished_segments", "seconds", "num_frames", "progress")}
    assert fields == {
        "next_prompts": PROMPTS,
        "finished_segments": 3,
        "seconds": "1.56",
        "num_frames": 9,
        "progress": 100,
    }
    assert video["warnings"] == ["the prompt was cut"]
    end = Image.open(io.BytesIO(content(http, video, "final_frame")))
    assert np.array_equal(np.asarray(end), np.asarray(read_frame(VideoContent(segments[-1]), 7)))


def test_a_continued_video_goes_on_for_several_segments(http, engine):
    first = wait_for_video(http, create(http, seed=1))
    form = {"prompt": (None, "on"), "video[id]": (None, first["id"]), "seed": (None, "3")}
    fields = [*form.items(), *(("next_prompts", (None, prompt)) for prompt in PROMPTS)]
    whole = wait_for_video(http, http.post("/v1/videos/extensions", files=fields))
    segments = [engine.video(request) for request in engine.requests[1:]]
    assert [len(packets(part)) for part in segments] == [8, 8, 8]
    assert packets(content(http, whole)) == packets(content(http, first)) + list_packets(segments)
    assert (whole["seconds"], whole["finished_segments"]) == ("2.06", 3)
    again = http.post(f"/v1/videos/{whole['id']}/remix", json={"prompt": "otherwise"}).json()
    assert (again["prompt"], again["next_prompts"], again["seconds"]) == ("otherwise", PROMPTS, "2.06")


def test_a_job_that_makes_headway_is_not_given_up(settings, engine):
    limited = change_reliability(settings, pipeline_pause_s=0.1, job_attempts=2)
    generate, lost = engine.generate, set()

    async def lose_each_segment_once(plan, **options):
        if plan.request.seed not in lost:
            lost.add(plan.request.seed)
            raise RequestFailed("its slices were lost", "lost")
        return await generate(plan, **options)

    engine.generate = lose_each_segment_once
    with working(limited, engine), serve(settings) as address, open_client(address) as http:
        assert wait_for_video(http, create(http, next_prompts=["on"]))["attempts"] == 3
        engine.failure = RequestFailed("its slices were lost", "lost")  # No segment is finished from now on.
        assert wait_for_end(http, create(http, next_prompts=["on"]).json()["id"])["attempts"] == 2


def test_a_segment_that_can_not_be_decoded_is_not_the_request_s_fault(http, engine):
    video = engine.video
    engine.video = lambda *arguments: video(*arguments)[:900]
    error = wait_for_end(http, create(http, next_prompts=PROMPTS).json()["id"])["error"]
    assert error["code"] == "broken_video", error


def test_the_whole_is_streamed_though_its_worker_ends(settings, tmp_path):
    engine = serving.DecodingEngine(tmp_path)
    engine.model = SOUND_SPEC
    frames = 38  # Of the second segment; each segment has three fragments.
    with serve(settings, SOUND_SPEC) as address, open_client(address) as http:
        job = create(http, num_frames=frames + 1, next_prompts=["on"], seed=3).json()["id"]
        with watching(http, job) as (_, viewer):
            engine.decoded.release(4)
            with working(settings, engine):
                wait_for(lambda: len(list_frames(viewer.received)) == frames + 17)
            engine.decoded.release(3)
            with working(settings, engine):
                content_, cut = viewer.end()
        assert (cut, len(engine.requests)) == (False, 3)
        assert list_frames(content_) == list_frames(content(http, {"id": job}))


def test_what_cant_be_made_in_segments_is_refused(settings, http):
    image = {"image_url": "https://example.com/a.png"}
    for fields, param, named in (
        ({"next_prompts": ["on"], "last_frame": image}, "last_frame", ""),
        ({"next_prompts": ["on", ""]}, "next_prompts.1", "1"),
        ({"next_prompts": ["on"], "num_frames": 1}, "num_frames", "5"),
        ({"next_prompts": "on and on"}, "next_prompts", ""),
        ({"next_prompts": ["on"] * 30}, "next_prompts", "29"),
    ):
        answer = create(http, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param) and named in error["message"], (fields, error)
    short = dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, extended_s=1.0))
    with serve(short) as address, open_client(address) as strict:
        error = create(strict, next_prompts=["on"]).json()["error"]
        assert error["param"] == "next_prompts", error

    class TextSpec(SmallSpec):
        tasks = ("t2v",)

    class BothFramesSpec(SmallSpec):
        tasks, last_images = ("i2v",), "required"

    class TextPresetSpec(SmallSpec):
        presets: ClassVar = {"fast": Preset("fast", "here", (), text_only=True)}

    class SeesMotion(SmallSpec):
        takes_video = continues_video = True

    cached = {"cache": "magcache", "shift": 12}
    for kind, fields, param in (
        (TextSpec, {}, "video"),
        (BothFramesSpec, {"input_reference": image, "last_frame": image}, "last_frame"),
        (TextPresetSpec, {"preset": "fast"}, "next_prompts"),
        (SeesMotion, cached, "cache"),
    ):
        with serve(settings, kind(serving.SPEC.config)) as address, open_client(address) as other:
            error = create(other, next_prompts=["on"], **fields).json()["error"]
            assert error["param"] == param, error
