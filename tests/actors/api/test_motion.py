"""Segments that begin with the end of the one before, motion and sound included, or with its last frame alone."""

import itertools
import wave
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from actors.api.catalogue import Catalogue
from actors.api.segments import can_read, check_motion
from actors.api.worker.failures import InputGone
from actors.api.worker.segments import rebuild_request, shows_end
from actors.api.worker.thumbnails import BrokenVideo
from actors.errors import RequestFailed
from actors.jobs.store import JobStore
from actors.jobs.stored_request import Redo
from actors.jobs.tables import Job
from actors.jobs.work import WorkQueue
from tests.actors.api.serving import (
    change_limits,
    create,
    data_url,
    make_tail,
    open_client,
    serve,
    wait_for_end,
    working,
)
from tests.actors.api.test_extensions import content, extend, packets, wait_for_video
from tests.actors.api.test_segments import PROMPTS, list_packets
from tests.actors.small_spec import MOTION_SPEC, SOUND_SPEC, MotionSpec
from wan_tpu import GenerationRequest, InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.reference import ENDING
from wan_tpu.request import IMAGES
from wan_tpu.storage.base import Missing
from wan_tpu.storage.local import LocalStorage

FIELDS = "hidden_frames", "blended_frames", "keeps_tail", "origin"


@pytest.fixture
def http(settings, engine):
    engine.model = MOTION_SPEC
    with working(settings, engine), serve(settings, MOTION_SPEC) as address, open_client(address) as client:
        yield client


def list_fields(requests):
    return [tuple(getattr(request, name) for name in FIELDS) for request in requests]


def picture():
    return data_url(Image.new("RGB", (96, 64), "teal"))


def test_segments_go_on_from_the_end_of_the_one_before(http, engine, database):
    [model] = http.get("/v1/models").json()["data"]
    assert model["continues_motion"] and model["follows_sound"] and not model["continues_video"]
    look = {"type": "image_url", "image_url": {"url": picture()}}
    video = wait_for_video(http, create(http, seed=5, next_prompts=PROMPTS, input_references=[look]))
    assert list_fields(engine.requests) == [(0, 5, True, 0), (17, 5, True, 17), (17, 0, True, 34)]
    assert [[kind.kind for kind in request.references] for request in engine.requests] == [
        ["image"],
        ["image", "tail"],
        ["image", "tail"],
    ]
    for before, request in zip(engine.requests[:-1], engine.requests[1:], strict=True):
        assert np.array_equal(request.references[-1].source.latents, make_tail(before).latents)
        assert request.image is None and request.references[0].source.size == (96, 64)
    segments = [engine.video(request) for request in engine.requests]
    assert packets(content(http, video)) == list_packets(segments) and len(list_packets(segments)) == 39 + 2 * 17
    fields = {name: video[name] for name in ("continue_by", "finished_segments", "seconds", "num_frames")}
    assert fields == {"continue_by": "motion", "finished_segments": 3, "seconds": "3.04", "num_frames": 39}
    job = JobStore(database).get(video["id"])
    assert job.request["continue_by"] == "motion" and can_read(job)
    again = wait_for_video(http, http.post(f"/v1/videos/{video['id']}/remix", json={"prompt": "otherwise"}))
    assert (again["continue_by"], again["seconds"]) == ("motion", "3.04")


def test_the_last_frame_alone_is_continued_if_that_is_asked_for(http, engine, database):
    video = wait_for_video(http, create(http, next_prompts=PROMPTS, continue_by="frame"))
    assert list_fields(engine.requests) == [(0, 0, False, 0), (1, 0, False, 0), (1, 0, True, 0)]
    assert all(request.references is None and request.image is not None for request in engine.requests[1:])
    assert video["continue_by"] is None and video["seconds"] == "4.79"
    # An earlier version can run it, too.
    assert "continue_by" not in JobStore(database).get(video["id"]).request


def test_a_finished_video_is_continued_with_its_motion(http, engine, settings):
    first = wait_for_video(http, create(http, seed=1))
    whole = wait_for_video(http, extend(http, first["id"], seed=3, next_prompts=["on"]))
    assert list_fields(engine.requests[1:]) == [(22, 5, True, 17), (17, 0, True, 34)]
    [end] = engine.requests[1].references
    assert (end.kind, end.source.blended) == ("tail", 0)
    assert np.array_equal(end.source.latents, make_tail(engine.requests[0]).latents)
    segments = [engine.video(request) for request in engine.requests]
    assert packets(content(http, whole)) == list_packets(segments) and whole["seconds"] == "3.04"
    form = {"prompt": (None, "on"), "video": ("a.mp4", content(http, first), "video/mp4")}
    sent = wait_for_video(http, http.post("/v1/videos/extensions", files=form))
    [end] = engine.requests[-1].references
    assert (end.kind, end.source.pixels.shape, sent["seconds"]) == ("continued", (22, 64, 96, 3), "2.33")
    short = wait_for_video(http, create(http, num_frames=5))
    exact = change_limits(settings, extended_s=56 / 24)  # Of 39 and 39 frames, 22 are the same ones.
    with serve(exact, MOTION_SPEC) as address, open_client(address) as limited:
        assert extend(limited, first["id"]).status_code == 200
        for video, fields, param in (
            (first, {"next_prompts": ["on"]}, "next_prompts"),
            (whole, {}, "video"),
            (short, {"continue_by": "motion"}, "continue_by"),
            (first, {"audio_mode": "reference"}, "audio_mode"),
        ):
            answer = extend(limited, video["id"], **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    with serve(settings, SOUND_SPEC) as address, open_client(address) as other:
        answer = extend(other, short["id"], continue_by="motion")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_by"), answer.text


def redo(http, video, segment, **fields):
    return http.post(f"/v1/videos/{video}/segments/{segment}/redo", json={"prompt": "otherwise", **fields})


def test_one_segment_is_made_again_and_the_others_stay(http, engine, database, monkeypatch):
    first = wait_for_video(http, create(http, seed=5, next_prompts=PROMPTS))
    monkeypatch.setattr(WorkQueue, "give_way", lambda self, job: pytest.fail("no segment is left to be made"))
    made = [engine.video(request) for request in engine.requests]
    tails = [make_tail(request).latents for request in engine.requests[:2]]
    again = wait_for_video(http, redo(http, first["id"], 2, seed=9))
    assert len(engine.requests) == 4
    request = engine.requests[3]
    assert (request.prompt, request.seed, *list_fields([request])) == ("otherwise", 9, (17, 5, False, 17))
    kinds = [(end.kind, float(end.source.latents.flat[0])) for end in request.references]
    assert kinds == [("tail", tails[0].flat[0]), ("goal", tails[1].flat[0])]
    assert packets(content(http, again)) == list_packets([made[0], engine.video(request), made[2]])
    names = ("prompt", "next_prompts", "remixed_from_video_id", "seconds", "redo_segment", "redo_seed")
    assert {name: again[name] for name in names} == {
        "redo_segment": 2,
        "redo_seed": 9,
        "prompt": "a cat",
        "next_prompts": ["otherwise", PROMPTS[1]],
        "remixed_from_video_id": first["id"],
        "seconds": first["seconds"],
    }
    assert JobStore(database).get(again["id"]).segments_left == 0
    end = make_tail(engine.requests[2]).latents
    wait_for_video(http, extend(http, again["id"]))  # From the exact end of the segment that stayed.
    assert np.array_equal(engine.requests.pop().references[0].source.latents, end)
    # The others belong to both: what was made again can be made again, even if the first video is gone.
    assert http.delete(f"/v1/videos/{first['id']}").status_code == 200
    last = wait_for_video(http, redo(http, again["id"], 3))
    [third] = engine.requests[4:]
    assert [end.kind for end in third.references] == ["tail"] and list_fields([third]) == [(17, 0, True, 34)]
    assert packets(content(http, last)) == list_packets([made[0], engine.video(request), engine.video(third)])


def test_what_cant_be_made_again_is_refused(http, engine):
    framed = wait_for_video(http, create(http, next_prompts=["on"], continue_by="frame", num_frames=22))
    single = wait_for_video(http, create(http, num_frames=5))
    video = wait_for_video(http, create(http, next_prompts=["on"], input_reference={"image_url": picture()}))
    for id, segment, status in (
        (framed["id"], 2, 400),
        (single["id"], 1, 400),
        (video["id"], 3, 400),
        (video["id"], 1, 400),  # It begins with an image.
        (video["id"], 0, 400),
        ("video_" + "0" * 48, 1, 404),
    ):
        answer = redo(http, id, segment)
        assert answer.status_code == status, answer.text
    assert redo(http, video["id"], 2, size="96x64").status_code == 400
    engine.failure = RequestFailed("it gave NaN", "unhealthy")
    failed = wait_for_end(http, create(http, next_prompts=["on"]).json()["id"])
    assert redo(http, failed["id"], 2).json()["error"]["code"] == "video_not_ready"
    for fields in ({"continue_by": "frame"}, {"continue_by": "sound", "next_prompts": ["on"]}):
        answer = create(http, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_by")


class Limited(MotionSpec):
    """The same model on a layout without the stage that continues videos."""

    overlap = None
    reference_counts: ClassVar = {}


def test_segments_that_the_stages_cant_make_are_not_begun(settings, engine):
    engine.model = Limited(MOTION_SPEC.config)
    with serve(settings, MOTION_SPEC) as address, open_client(address) as http:
        job = create(http, next_prompts=["on"]).json()["id"]
        with working(settings, engine):
            error = wait_for_end(http, job)["error"]
    assert (error["code"], engine.requests) == ("invalid", [])
    with serve(settings, engine.model) as address, open_client(address) as http:
        answer = http.post(f"/v1/videos/{job}/remix", json={"prompt": "otherwise"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_by"), answer.text


@pytest.fixture
def stored(tmp_path):
    return LocalStorage(tmp_path / "stored")


def make_job(segments=(), **fields):
    plan = MOTION_SPEC.plan(GenerationRequest(prompt="a"))
    request = {name: value for name, value in plan.request.to_json().items() if name not in (*IMAGES, "video")}
    request |= {"model": "small", "continue_by": "motion", "added_frames": 17}
    own = {name: fields.pop(name) for name in ("input_video", "segments_end") if name in fields}
    return Job(owner="ann", request=request | fields, segments=list(segments), **own)


def rebuild(job, stored, source=None):
    return rebuild_request(job, stored, Catalogue(), MOTION_SPEC, source)


def test_segment_that_can_not_be_joined_is_not_begun(stored):
    again = Redo(1, 9, (None, "second"), ("end",)).to_stored()
    job = make_job(next_prompts=["on"], redo=again)
    stored.write("end", make_tail(MOTION_SPEC.plan(GenerationRequest(prompt="a", seed=3)).request).dump())
    with pytest.raises(Missing):
        rebuild(job, stored)
    stored.write("second", b"mp4")
    assert [end.kind for end in rebuild(job, stored).references] == ["goal"]
    with pytest.raises(InputGone):
        rebuild(make_job(["first"], next_prompts=["on"]), stored)


def test_damaged_file_of_the_service_is_not_the_client_s_fault(stored, tmp_path):
    stored.write("end", b"damaged")
    jobs = [
        make_job(["first"], next_prompts=["on"], segments_end="end"),
        make_job(input_video="video", source_frames=39, end_file="end"),
        make_job(references=[{"kind": "soundtrack", "samples": 9, "sample_rate": 9}], reference_files=["end"]),
    ]
    for job in jobs:
        with pytest.raises(BrokenVideo):
            rebuild(job, stored)
    (tmp_path / "video.mp4").write_bytes(b"damaged")
    with pytest.raises(BrokenVideo):
        rebuild(make_job(input_video="video", source_frames=39), stored, tmp_path / "video.mp4")


def test_end_of_a_long_video_is_read_from_its_file(stored, engine, tmp_path):
    """Storage isn't asked for it, so that it is never in memory as a whole."""
    job = make_job(input_video="video", source_frames=39)
    assert shows_end(job) and not shows_end(make_job(input_video="video", source_frames=39, end_file="end"))
    engine.model = MOTION_SPEC
    (tmp_path / "video.mp4").write_bytes(engine.video(MOTION_SPEC.plan(GenerationRequest(prompt="a", seed=3)).request))
    [end] = rebuild(job, stored, tmp_path / "video.mp4").references
    assert (end.kind, end.frames, end.source.path) == ("continued", ENDING, None)


def send_sound(folder, seconds=0.5):
    """Return a tone, as a body has it."""
    with wave.open(str(folder / "song.wav"), "wb") as file:
        file.setparams((1, 2, 32000, 0, "NONE", ""))
        file.writeframes((np.sin(np.arange(round(seconds * 32000)) / 20) * 20000).astype("<i2").tobytes())
    return {"type": "audio_url", "audio_url": {"url": data_url((folder / "song.wav").read_bytes(), "audio/wav")}}


class SoundtrackSpec(MotionSpec):
    """A spec of a model that follows a sound, and takes no references otherwise."""

    reference_counts: ClassVar = {}
    most_references = 0
    follows_sound_from_image = True


def test_a_given_sound_becomes_the_video_s(http, engine, tmp_path):
    sound = send_sound(tmp_path)
    look = {"type": "image_url", "image_url": {"url": picture()}}
    video = wait_for_video(http, create(http, input_references=[sound, look], audio_mode="lock_source"))
    kinds = [(reference.kind, reference.samples > 0) for reference in engine.requests[0].references]
    assert kinds == [("soundtrack", True), ("image", False)]
    assert engine.requests[0].references[0].source.samples == 16000
    assert (video["references"], video["audio_mode"]) == (["audio", "image"], "lock_source")
    for fields, blamed in (
        ({"input_references": [look]}, "audio_mode"),
        ({"input_references": [sound, sound]}, "audio_mode"),
        ({"input_references": [sound], "next_prompts": ["on"]}, "next_prompts"),
        ({}, "audio_mode"),
    ):
        answer = create(http, audio_mode="lock_source", **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, blamed), answer.text
    silent = create(http, audio_mode="lock_source", input_references=[sound], generate_audio=False)
    assert (silent.status_code, silent.json()["error"]["param"]) == (400, "generate_audio"), silent.text


def test_a_soundtrack_is_read_as_far_as_its_video_lasts(http, engine, tmp_path):
    lasts = {"num_frames": 5, "fps": 2}  # 2.5 s.
    for seconds, kept, warnings in ((5, 3.5, 1), (2, 2, 1)):
        sound = send_sound(tmp_path, seconds)
        video = wait_for_video(http, create(http, input_references=[sound], audio_mode="lock_source", **lasts))
        [track] = engine.requests[-1].references
        assert (track.source.samples / 32000, len(video["warnings"])) == (kept, warnings), video["warnings"]


@pytest.mark.thorough
def test_an_end_made_in_fewer_stages_is_read_from_its_file(http, engine):
    """It lacks the latents of the others."""
    first = wait_for_video(http, create(http, num_inference_steps=1))
    wait_for_video(http, extend(http, first["id"], num_inference_steps=4))
    assert [end.kind for end in engine.requests[-1].references] == ["continued"]


def test_short_segment_is_not_made_again_between_others():
    """All of its frames are those of the others, and a redo can't have more."""
    spec = published_spec("ltx-2.3-distilled")
    second = Redo(2, 9, ("first", None, "third"), ("end", "end-2")).to_stored()
    first = Redo(1, 9, (None, "second"), ("end",)).to_stored()
    extension = {"next_prompts": ["on"], "redo": first, "input_video": "video", "source_frames": 65}
    jobs = [
        make_job(next_prompts=["on", "on"], redo=second),
        make_job(**extension, end_file="old end"),
        make_job(**extension),
    ]
    for job, frames in itertools.product(jobs, (57, 65)):
        plan = spec.plan(GenerationRequest(prompt="a", frames=frames, height=512, width=768))
        if frames == 65:
            check_motion(job, spec, plan.request)
            continue
        with pytest.raises(InvalidRequest) as refused:
            check_motion(job, spec, plan.request)
        assert refused.value.field == "segment"
