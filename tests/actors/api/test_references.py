"""References in the API: every form in which clients send them, their order, and what the pipeline gets."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from tests.actors.api import fetching, serving
from tests.actors.api.serving import create, data_url, open_client, serve, wait_for_end, working
from tests.actors.api.test_video_input import film
from tests.actors.small_spec import SmallSpec
from tests.waiting import wait_for
from wan_tpu.media.reading import read_frames, read_sound

TONE = "sine=f=440:r=44100:d=1"


class TakesReferences(SmallSpec):
    reference_counts = {"image": 2, "video": 1, "audio": 1}  # noqa: RUF012 (as a mapping that nobody changes)
    most_references = 3

    def fit_reference(self, request, kind, size):
        return (32, 48) if kind == "video" else (min(size[0], 40), min(size[1], 60))


@pytest.fixture(scope="module")
def files():
    """A picture, a video with sound, and a sound."""
    png = io.BytesIO()
    Image.fromarray(np.full((80, 120, 3), (200, 30, 60), np.uint8)).save(png, "PNG")
    mp4 = film("-f", "lavfi", "-i", TONE, "-bf", "0", "-pix_fmt", "yuv420p", source="testsrc=s=96x64:r=12:d=1")
    return {"image": png.getvalue(), "video": mp4, "audio": film(source=TONE, kind="wav")}


@pytest.fixture
def http(settings, engine):
    spec = engine.model = TakesReferences(serving.SPEC.config)
    with working(settings, engine), serve(settings, spec) as address, open_client(address) as client:
        client.timeout = 60
        yield client


def as_url(kind, content):
    types = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
    return data_url(content, types[kind])


def as_part(kind, content):
    key = f"{kind}_url"
    return {"type": key, key: {"url": as_url(kind, content)}}


def send_form(http, files, kinds):
    parts = [("input_references", (f"a.{kind}", files[kind])) for kind in kinds]
    return http.post("/v1/videos", data={"prompt": "x"}, files=parts)


def send_parts(http, files, kinds):
    return create(http, input_references=[as_part(kind, files[kind]) for kind in kinds])


def test_form_brings_them_in_order_and_a_remix_has_the_same(http, engine, files):
    kinds = ("audio", "image", "video")
    answer = send_form(http, files, kinds)
    assert answer.status_code == 200, answer.text
    video = wait_for_end(http, answer.json()["id"])
    assert (video["status"], tuple(video["references"]), video["audio_mode"]) == ("completed", kinds, None)
    remixed = http.post(f"/v1/videos/{video['id']}/remix", json={"prompt": "other"}).json()
    assert wait_for_end(http, remixed["id"])["status"] == "completed"
    request, again = engine.requests
    assert [str(reference) for reference in again.references] == [str(reference) for reference in request.references]
    assert http.get("/v1/models").json()["data"][0]["references"] == {"image": 2, "video": 1, "audio": 1}
    sound, picture, video = request.references
    assert tuple(reference.kind for reference in request.references) == kinds
    assert (sound.samples, sound.sample_rate) == (44100, 44100)
    samples, _ = read_sound(sound.source, 2)
    assert samples.shape == (1, 44100) and 0.08 < np.abs(samples).max() < 0.2  # As ffmpeg's source has it.
    # They are measured as they were sent, and brought to the size that the model needs.
    assert (picture.height, picture.width) == (80, 120) and picture.source.size == (60, 40)
    assert np.abs(np.asarray(picture.source, int) - (200, 30, 60)).max() <= 1
    # The encoder's delay makes the file's frames begin a little after its sound.
    assert (video.height, video.width) == (64, 96) and video.frames in (24, 25)
    assert 0.9 < video.samples / video.sample_rate < 1.2
    assert read_frames(video.source, 24)[0].size == (48, 32)


def test_a_video_comes_without_its_sound_if_that_is_said(http, engine, files):
    """As MiniMax's own script for references sends a video, beside the sound that the new video shall have."""
    uris = [{"type": kind, "uri": as_url(kind, files[kind]), "role": "reference"} for kind in ("video", "audio")]
    assert wait_for_end(http, create(http, task="ref2va", conditions=uris).json()["id"])["status"] == "completed"
    part = as_part("video", files["video"]) | {"with_sound": False}
    assert create(http, input_references=[part]).status_code == 200
    wait_for(lambda: len(engine.requests) == 2)
    for request in engine.requests:
        video = request.references[0]
        assert video.kind == "video" and video.frames in (24, 25) and (video.samples, video.sample_rate) == (0, 0)


def test_urls_are_fetched_as_what_they_are_said_to_be(hook_settings, hook, engine, files):
    spec = engine.model = TakesReferences(serving.SPEC.config)
    kinds = ("image", "audio", "video")
    hook.answers |= {f"/{kind}": fetching.answer(files[kind]) for kind in kinds}
    urls = {kind: f"https://pictures.test:{hook.port}/{kind}" for kind in kinds}
    with working(hook_settings, engine), serve(hook_settings, spec) as address, open_client(address) as http:
        http.timeout = 60
        parts = [{f"{kind}_url": {"url": url}} for kind, url in urls.items()]
        assert wait_for_end(http, create(http, input_references=parts).json()["id"])["status"] == "completed"
        assert [reference.kind for reference in engine.requests[-1].references] == list(urls)
        assert all(f"Accept: {kind}/*".encode() in sent for kind, sent in zip(urls, hook.requests, strict=True))
        parts = [{"image_url": {"url": urls["audio"]}}]
        assert create(http, input_references=parts).json()["error"]["param"] == "input_references"


def test_what_can_not_be_made_is_refused(http, settings, files):
    for fields, param, named in (
        ({"input_references": ["audio"]}, "input_references", "sound"),
        ({"input_references": ["image"] * 3}, "input_references", "3"),
        ({"input_references": ["image", "video", "audio", "image"]}, "input_references", "4"),
        ({"input_references": [{"type": "image_url"}]}, "input_references", "image_url"),
        ({"input_references": [{"image_url": {"url": "data:image/png;base64,AAAA"}}]}, "input_references", "image"),
        # They are counted before any of them is fetched.
        ({"input_references": [{"image_url": {"url": "https://a.test/b"}}] * 3}, "input_references", "3"),
        ({"input_references": [{"image_url": "data:,", "with_sound": False}]}, "input_references", "image_url"),
        ({"input_references": [{"video_url": "data:,", "with_sound": "no"}]}, "input_references", "with_sound"),
        ({"task": "ref2va"}, "task", "input_references"),
        ({"input_references": ["image"], "input_reference": {"image_url": "https://a.test/b"}}, "input_reference", ""),
    ):
        parts = fields.get("input_references", ())
        parts = [as_part(part, files[part]) if isinstance(part, str) else part for part in parts]
        error = create(http, **{**fields, **({"input_references": parts} if parts else {})}).json()["error"]
        assert error["param"] == param and named in error["message"], error
    with serve(settings) as address, open_client(address) as plain:
        error = send_parts(plain, files, ("image",)).json()["error"]
        assert error["param"] == "input_references" and "minimax-h3" in error["message"]


def test_files_of_which_too_much_would_be_read_are_refused(settings, engine, files):
    fast = film("-c:a", "pcm_u8", source="sine=f=440:r=400000:d=16", kind="wav")
    large = film("-f", "lavfi", "-i", TONE, "-pix_fmt", "yuv420p", source="testsrc=s=640x480:r=2:d=1")
    settings = dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, video_pixels=640 * 470))
    with serve(settings, TakesReferences(serving.SPEC.config)) as address, open_client(address) as http:
        http.timeout = 60
        for kinds in (("image", "fast"), ("image", "large")):  # A video isn't taken for its sound.
            answer = send_form(http, files | {"fast": fast, "large": large}, kinds)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "input_references"


def test_a_continuation_takes_none_and_inherits_none(http, engine, files):
    parts = [as_part("image", files["image"])]
    job = wait_for_end(http, create(http, input_references=parts, reference_size="match").json()["id"])
    assert job["reference_size"] == "match"
    body = {"prompt": "on", "video": {"id": job["id"]}}
    continued = http.post("/v1/videos/extensions", json=body)
    assert continued.status_code == 200, continued.text
    assert wait_for_end(http, continued.json()["id"])["status"] == "completed"
    assert engine.requests[-1].references is None and engine.requests[-1].reference_size is None
    sent = {"image_url": {"url": "https://a.test/b"}}
    error = http.post("/v1/videos/extensions", json=body | {"input_references": [sent]}).json()["error"]
    assert error["param"] == "input_references"
