"""The API's objects match the types of OpenAI's own client."""

import json
import math
from typing import get_args

import pytest
from openai.types import Video as OpenAIVideo
from pydantic import BaseModel, ValidationError

from actors.api.core.bodies import parse_json
from actors.api.core.create_video import CreateVideo
from actors.api.core.planning import make_request
from actors.api.http.objects import make_error_body, to_video
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from actors.jobs.values import Progress
from actors.jobs.work import WorkQueue
from wan_tpu.errors import InvalidRequest
from wan_tpu.families import published_spec
from wan_tpu.lengths import count_frames

SPEC = published_spec("wan2.2-i2v-a14b")


def submit(database, **fields):
    request = make_request(CreateVideo(prompt="a cat", **fields), SPEC, seed=7).resolve(SPEC.defaults)
    return JobStore(database).submit(Job(owner="ann", request=request.to_json() | {"model": "wan2.2-i2v-a14b"}))[0]


def as_openai(video):
    """Parse an object strictly with OpenAI's client: all required fields exist, and all types are right."""
    return OpenAIVideo.model_validate_json(video.model_dump_json(), strict=True)


def test_a_video_in_every_state_is_one_to_openai_s_client(database):
    store, work = JobStore(database), WorkQueue(database)
    job = submit(database)
    job.position = 2
    queued = as_openai(to_video(job, 12.34))
    assert (queued.status, queued.progress, queued.seconds, queued.size) == ("queued", 0, "5.06", "1280x720")
    assert queued.created_at == int(job.created_at)
    assert (queued.completed_at, queued.expires_at, queued.error) == (None, None, None)
    leased = work.claim("w")
    leased.progress = Progress(stage="denoise_low", step=38, steps=40, percent=99.0, compiles=True)
    work.renew_lease(leased)
    assert to_video(store.get(job.id)).compiling
    leased.progress = Progress(stage="denoise_low", step=39, steps=40, percent=99.9)
    work.renew_lease(leased)
    running = to_video(store.get(job.id))
    assert not running.compiling
    assert as_openai(running).progress == 99
    assert (running.stage, running.step, running.num_inference_steps) == ("denoise_low", 39, 40)
    work.announce(leased, {"video": 1})
    work.keep_last_segment(leased, {"video": "video"}, ["the prompt was cut"])
    ended = work.complete(leased, {"video": "video"})
    done = as_openai(to_video(ended))
    assert to_video(ended).warnings == ["the prompt was cut"]
    assert (done.status, done.progress) == ("completed", 100)
    assert done.expires_at > done.completed_at >= done.created_at
    cancelled = as_openai(to_video(store.cancel(submit(database).id)))
    assert (cancelled.status, cancelled.error.code) == ("failed", "cancelled")


def test_a_size_is_width_by_height():
    """An asterisk would be ambiguous, since programs read it in either order."""
    request = make_request(CreateVideo(prompt="x", size="1280x720"), SPEC, seed=0)
    assert (request.width, request.height) == (1280, 720)
    with pytest.raises(InvalidRequest, match="1088x1920"):
        make_request(CreateVideo(prompt="x", size="1080x1920"), SPEC, seed=0)
    with pytest.raises(InvalidRequest, match="1280x720 or 720x1280") as refused:
        make_request(CreateVideo(prompt="x", size="1280*720"), SPEC, seed=0)
    assert refused.value.field == "size"


@pytest.mark.parametrize("size", ["", "720", "0x720", "720X1280", "-1x720", "1x2x3", "٧٢٠x١٢٨٠", "9" * 99])
def test_text_that_is_no_size_is_refused(size):
    with pytest.raises(InvalidRequest, match="WIDTHxHEIGHT"):
        make_request(CreateVideo(prompt="x", size=size), SPEC, seed=0)


@pytest.mark.parametrize("seconds", ["", "0", "-1", "nan", "inf", "1e3", "9999", "five", "٥"])
def test_number_that_is_no_length_is_refused(seconds):
    with pytest.raises(InvalidRequest, match="seconds"):
        count_frames(seconds, 16, SPEC)


@pytest.mark.parametrize(
    "field",
    [{"prompt": ""}, {"prompt": "x" * 32_001}, {"num_frames": 0}, {"shift": math.nan}, {"guidance_scale": math.inf},
     {"seed": -1}, {"priority": 1000}, {"solver": "x" * 81}, {"unknown": 1}, {"deadline": math.inf}],
)  # fmt: skip
def test_fields_have_limits(field):
    with pytest.raises(ValidationError):
        CreateVideo(**{"prompt": "x"} | field)


def texts_of(model, prefix=()):
    """Return the paths of the text fields of a request's model, including nested ones."""
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            for inner in (kind, *get_args(kind)):
                if inner is str:
                    yield (*prefix, name)
                elif isinstance(inner, type) and issubclass(inner, BaseModel):
                    yield from texts_of(inner, (*prefix, name))


@pytest.mark.parametrize("character", ["\0", "\ud800"])
@pytest.mark.parametrize("path", sorted(set(texts_of(CreateVideo))), ids=".".join)
def test_no_text_of_a_request_has_what_a_database_may_not_store(path, character):
    outer, *inner = path
    body, wrong = {"prompt": "x"}, f"a{character}b"
    if not inner:
        body[outer] = wrong
    elif outer == "loras":
        body[outer] = [{"name": "x"} | {inner[0]: wrong}]
    else:
        body[outer] = {inner[0]: wrong}
    with pytest.raises(InvalidRequest, match="NUL" if character == "\0" else "surrogate") as refused:
        parse_json(json.dumps(body))
    assert refused.value.field.split(".")[0] == outer and refused.value.field.endswith(path[-1])


def test_an_error_that_names_an_odd_field_is_still_an_answer():
    with pytest.raises(InvalidRequest) as refused:
        parse_json(json.dumps({"prompt": "x", "\ud800\0": 1}))
    assert make_error_body(400, str(refused.value), param=refused.value.field).model_dump_json()


def test_requested_fields_reach_the_pipeline():
    body = CreateVideo(
        prompt="a cat", negative_prompt="dogs", size="832x480", num_frames=49, fps=12, num_inference_steps=8,
        guidance_scale=4, guidance_scale_2=3, shift=2, seed=11, solver="euler",
    )  # fmt: skip
    request = make_request(body, SPEC, seed=0)
    assert request.to_json() == {
        "prompt": "a cat", "negative_prompt": "dogs", "image": None, "height": 480, "width": 832, "frames": 49,
        "fps": 12, "steps": 8, "guidance_scale": 4, "guidance_scale_2": 3, "shift": 2, "seed": 11, "solver": "euler",
        "last_image": None, "loras": [], "sigmas": None, "switch_step": None, "preset": None, "cache": None,
        "video": None, "strength": None,
    }  # fmt: skip
