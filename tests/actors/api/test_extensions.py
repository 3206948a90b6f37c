"""Videos that continue others: by id and as files, joined without encoding again, whatever dies meanwhile."""

import dataclasses
import io
import subprocess
from pathlib import Path

import httpx
import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest
from openai import OpenAI
from PIL import Image
from sqlalchemy import select

from actors.jobs.keys import make_key
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from tests.actors.api import serving
from tests.actors.api.serving import (
    bearer,
    change_limits,
    change_reliability,
    create,
    open_client,
    serve,
    wait_for_end,
    working,
)
from tests.actors.small_spec import DEFAULTS, SmallSpec
from wan_tpu.media.joining import read_clip
from wan_tpu.media.reading import read_frame
from wan_tpu.media.video_content import VideoContent


@pytest.fixture
def http(settings, engine):
    with working(settings, engine), serve(settings) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield client


def extend(http, source, headers=None, **fields):
    body = {"prompt": "it goes on", "video": {"id": source}, **fields}
    return http.post("/v1/videos/extensions", json=body, headers=headers or {})


def wait_for_video(http, answer):
    assert answer.status_code == 200, answer.text
    video = wait_for_end(http, answer.json()["id"])
    assert video["status"] == "completed", video
    return video


def content(http, video, variant="video"):
    return http.get(f"/v1/videos/{video['id']}/content", params={"variant": variant}).raise_for_status().content


def ffmpeg(mp4, *target):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "-", *target, "-"]
    return subprocess.run(command, input=mp4, capture_output=True, check=True).stdout


def packets(mp4):
    """Return size and digest of every packet of the frames."""
    text = ffmpeg(mp4, "-map", "0:v", "-c", "copy", "-f", "framehash").decode()
    return [line.split(",")[4:] for line in text.splitlines() if line[0] != "#"]


def frames(mp4):
    exact = ["-vf", "scale=flags=bicubic+accurate_rnd+full_chroma_int,format=rgb24"]
    return np.frombuffer(ffmpeg(mp4, *exact, "-f", "rawvideo"), np.uint8).reshape(-1, 64, 96, 3)


def clip(mp4, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(mp4)
    return read_clip(tmp_path / "clip.mp4")


def test_a_chain_of_extensions_by_id(http, engine, tmp_path):
    first = wait_for_video(http, create(http, seed=1, num_inference_steps=3, guidance_scale=2))
    source = content(http, first)
    second = wait_for_video(http, extend(http, first["id"], seed=9, seconds="1"))
    whole = content(http, second)
    [_, request] = engine.requests
    assert (request.steps, request.guidance_scale, request.seed, request.frames) == (3, 2, 9, 17)
    end = Image.open(io.BytesIO(content(http, first, "final_frame")))
    assert np.array_equal(np.asarray(end), frames(source)[-1]) and np.array_equal(np.asarray(request.image), end)
    assert packets(whole) == packets(source) + packets(engine.video(request))
    assert len(packets(whole)) == 9 + 17 - 1
    assert (second["extended_from_video_id"], second["num_frames"], second["size"]) == (first["id"], 17, "96x64")
    assert (second["seconds"], second["video_size"]) == ("1.56", "96x64")
    assert content(http, second, "input_video") == source
    assert len(frames(content(http, second))) == 25
    third = wait_for_video(http, extend(http, second["id"], num_frames=5))
    assert packets(content(http, third))[:25] == packets(whole) and clip(content(http, third), tmp_path).frames == 29
    assert third["seconds"] == "1.81"
    again = wait_for_video(http, http.post(f"/v1/videos/{third['id']}/remix", json={"prompt": "otherwise"}))
    assert packets(content(http, again))[:25] == packets(whole)
    assert (again["remixed_from_video_id"], again["prompt"]) == (third["id"], "otherwise")


def test_the_last_frame_is_kept_as_it_was_before_it_was_compressed(http, engine, monkeypatch):
    drawn = np.random.default_rng(2).integers(0, 255, (64, 96, 3)).astype(np.uint8)
    generate = engine.generate

    async def generate_with_last_frame(plan, **options):
        return dataclasses.replace(await generate(plan, **options), last_frame=drawn)

    monkeypatch.setattr(engine, "generate", generate_with_last_frame)
    first = wait_for_video(http, create(http))
    wait_for_video(http, extend(http, first["id"]))
    assert np.array_equal(np.asarray(engine.requests[-1].image), drawn)


def test_openai_s_client_sends_a_file(http):
    first = wait_for_video(http, create(http, seed=1))
    with OpenAI(base_url=str(http.base_url).rstrip("/") + "/v1", api_key="none", max_retries=0) as client:
        file = client.videos.extend(prompt="on", seconds="1", video=io.BytesIO(content(http, first)))
        wait_for_end(http, file.id)
    whole = frames(content(http, {"id": file.id}))
    # The client's file was encoded again, in grey frames that lose little by it.
    assert np.abs(whole[:9].astype(int) - frames(content(http, first))).max() <= 3
    assert len(whole) == 9 + 17 - 1


def test_a_file_of_another_kind_gets_the_size_and_rate_of_what_follows(http, engine, tmp_path):
    path = tmp_path / "other.mkv"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-f", "lavfi", "-i", "testsrc=s=100x66:r=30:d=1"]
    subprocess.run([*command, "-f", "lavfi", "-i", "sine=d=1", "-c:v", "mpeg4", path], check=True)
    form = {"prompt": (None, "on"), "video": ("a.mkv", path.read_bytes()), "num_frames": (None, "5")}
    video = wait_for_video(http, http.post("/v1/videos/extensions", files=form))
    assert (video["size"], video["video_size"], video["extended_from_video_id"]) == ("96x64", "100x66", None)
    result = clip(content(http, video), tmp_path)
    assert (result.frames, result.rate, result.size, result.sound) == (
        16 + 5 - 1,
        16,
        (96, 64),
        ("aac", 44100, "stereo"),
    )
    whole = frames(content(http, video))
    expected = read_frame(VideoContent(content(http, video, "input_video")), 15)
    assert np.array_equal(np.asarray(engine.requests[-1].image), np.asarray(expected))
    # Its end is shown there, and not only its colours, of which the file has a quarter as many pixels.
    pictures = [Image.fromarray(frame).resize((96, 64)) for frame in iio.imread(path, plugin="FFMPEG")]
    assert np.argmin([np.abs(whole[15] - np.asarray(frame, int)).mean() for frame in pictures]) >= 27


def test_a_model_that_sees_motion_gets_the_whole_video(settings, engine):
    class SeesMotion(SmallSpec):
        takes_video = continues_video = True

    spec = engine.model = SeesMotion(serving.SPEC.config)
    with working(settings, engine), serve(settings, spec) as address, open_client(address) as http:
        first = wait_for_video(http, create(http))
        source = content(http, first)
        second = wait_for_video(http, extend(http, first["id"], num_frames=5))
        request = engine.requests[-1]
        assert (request.image, request.strength, request.hidden_frames, request.video.content) == (None, 1, 0, source)
        assert packets(content(http, second)) == packets(source) + packets(engine.video(request))
        assert second["num_frames"] == 5 and len(packets(content(http, second))) == 9 + 5
        assert content(http, second, "input_video") == source


def test_a_source_that_is_gone_fails_the_job_before_anything_is_computed(settings, engine, database):
    hasty = change_reliability(settings, input_attempts=1)
    with serve(hasty) as address, open_client(address) as http:
        with working(hasty, engine):
            first = wait_for_video(http, create(http))
        second = extend(http, first["id"]).json()["id"]
        Path(settings.storage, JobStore(database).get(second).input_video).unlink()
        with working(hasty, engine):
            assert wait_for_end(http, second)["error"]["code"] == "input_lost"
    assert len(engine.requests) == 1


def test_what_cant_be_continued_is_refused_with_what_to_do(http, engine, settings):
    first = wait_for_video(http, create(http))
    image = {"image_url": "https://example.com/a.png"}
    for fields, param, code in (
        ({"size": "64x96"}, "size", "invalid_value"),
        ({"fps": 8}, "fps", "invalid_value"),
        ({"input_reference": image}, "input_reference", "invalid_value"),
        ({"strength": 0.5}, "strength", "invalid_value"),
        ({"num_frames": 1}, "num_frames", "invalid_value"),
        ({"video": None}, "video", "invalid_value"),
        ({"video": {"id": "video_" + "0" * 48}}, "video", "video_not_found"),
        ({"video": {"id": 7}}, "video", "invalid_value"),
        ({"video": "elsewhere.mp4"}, "video", "invalid_value"),
        ({"video": {"id": "x", "video_url": "https://a.b/c"}}, "video", "invalid_value"),
        ({"video": "data:video/mp4;base64,aGVsbG8="}, "video", "invalid_value"),
        ({"video": "data:image/png;base64,aGVsbG8="}, "video", "invalid_value"),
        ({"video": "https://127.0.0.1/a.mp4"}, "video", "invalid_value"),
    ):
        answer = extend(http, first["id"], **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), (fields, error)
    headers = {"Idempotency-Key": "once"}
    assert extend(http, first["id"], headers).json()["id"] == extend(http, first["id"], headers).json()["id"]
    body = {"prompt": "it goes on", "video": {"id": first["id"]}}
    assert http.post("/v1/videos", json=body, headers=headers).status_code == 409  # The same body on another route.
    engine.go.clear()
    unfinished = create(http).json()["id"]
    error = extend(http, unfinished).json()["error"]
    assert (error["code"], error["param"]) == ("video_not_ready", "video")
    engine.go.set()
    with serve(change_limits(settings, extended_s=1.0)) as address, open_client(address) as strict:
        assert " 1 s" in extend(strict, first["id"]).json()["error"]["message"]


def test_video_of_any_size_is_continued_without_being_read_by_the_ingress(http, settings):
    first = wait_for_video(http, create(http))
    source = content(http, first)
    assert len(source) > 1000
    with serve(change_limits(settings, bodies_bytes=1000)) as address, open_client(address) as strict:
        second = extend(strict, first["id"])
        assert content(strict, second.json(), "input_video") == source
        assert packets(content(http, wait_for_video(http, second)))[:9] == packets(source)
        remix = strict.post(f"/v1/videos/{second.json()['id']}/remix", json={"prompt": "otherwise"})
        assert content(strict, remix.json(), "input_video") == source


def test_settings_of_an_earlier_model_are_left_out(http, settings):
    class NextSpec(SmallSpec):
        frame_step = 8
        defaults = dataclasses.replace(DEFAULTS, steps=6, frames=17, fps=24)

    class CoarseSpec(SmallSpec):
        size_multiple = 64
        defaults = dataclasses.replace(DEFAULTS, width=128)

    first = wait_for_video(http, create(http, num_inference_steps=3, num_frames=13))
    upgraded = dataclasses.replace(settings, model="wan-next")
    with serve(upgraded, NextSpec(serving.SPEC.config)) as address, open_client(address) as later:
        second = extend(later, first["id"]).json()
        assert (second["size"], second["fps"]) == ("96x64", 16)  # As the video has, so that its packets are copied.
        assert (second["num_inference_steps"], second["num_frames"]) == (6, 17)
    with serve(upgraded, CoarseSpec(serving.SPEC.config)) as address, open_client(address) as later:
        error = extend(later, first["id"]).json()["error"]
        assert error["param"] == "size"
        form = {"prompt": (None, "on"), "video": ("a.mp4", content(http, first))}
        assert later.post("/v1/videos/extensions", files=form).json()["size"] == "128x64"


def test_settings_that_are_no_longer_offered_are_named(http, database):
    first = wait_for_video(http, create(http, num_inference_steps=3))
    with database.write() as session:
        job = session.scalars(select(Job).where(Job.id == first["id"])).one()
        job.request = job.request | {"preset": "gone", "loras": [{"name": "gone too", "scale": 1.0}]}
    error = extend(http, first["id"]).json()["error"]
    assert error["param"] == "loras"
    assert first["id"] in error["message"] and "gone too" in error["message"]
    second = extend(http, first["id"], loras=[]).json()
    assert (second["preset"], second["num_inference_steps"]) == ("original", 3)


def test_another_key_s_video_cant_be_continued(http, settings, database, engine):
    ann, bob = (bearer(make_key(database, name)) for name in ("ann", "bob"))
    with serve(settings) as address, open_client(address) as keyed:
        first = create(keyed, ann).json()["id"]
        keyed.headers = ann
        wait_for_end(keyed, first)
        assert extend(keyed, first, bob).json()["error"]["code"] == "video_not_found"
        assert extend(keyed, first, ann).status_code == 200
