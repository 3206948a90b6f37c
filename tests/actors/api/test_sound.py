"""Videos with sound over HTTP: what is asked for, what is answered and stored, and what the file holds."""

import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from actors.api.http.models import describe_model
from actors.api.settings import ServiceSettings
from actors.jobs.store import JobStore, open_database
from tests.actors.api import serving
from tests.actors.api.serving import create, data_url, open_client, serve, wait_for_end, working
from tests.actors.small_spec import SOUND_SPEC
from wan_tpu import InvalidRequest
from wan_tpu.data import Video
from wan_tpu.families import published_spec
from wan_tpu.lengths import count_frames

H3 = published_spec("minimax-h3")
RATE = SOUND_SPEC.audio_rate


class SoundEngine(serving.Engine):
    """Makes videos with a tone, unless a request asks for none."""

    model = SOUND_SPEC

    def video(self, request, name="made"):
        pixels = np.zeros((request.frames, request.height, request.width, 3), np.float32)
        tone = np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE)[None].repeat(2, 0).astype(np.float32)
        sound = (tone / 2, RATE) if request.generate_audio else ()
        return Video(pixels, request.fps, *sound).save(self._folder / f"{name}.mp4").read_bytes()


@pytest.fixture
def sound_http(settings):
    with serve(settings, SOUND_SPEC) as address, open_client(address) as http:
        yield http


def streams(content):
    ffmpeg = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", "-"], input=content, capture_output=True)
    return [kind for kind in ("Video: h264", "Audio: aac") if kind in ffmpeg.stderr.decode()]


def stored_request(settings, id):
    database = open_database(settings.database)
    try:
        return JobStore(database).get(id).request
    finally:
        database.close()


def test_video_has_sound_unless_a_request_asks_for_none(sound_http, settings, tmp_path):
    requests = [{}, {"generate_audio": True}, {"generate_audio": False}]
    jobs = [create(sound_http, **fields).json() for fields in requests]
    assert [job["generate_audio"] for job in jobs] == [True, True, False]
    with working(settings, SoundEngine(tmp_path)):
        videos = [wait_for_end(sound_http, job["id"]) for job in jobs]
    assert [(video["status"], video["generate_audio"]) for video in videos] == [
        ("completed", True),
        ("completed", True),
        ("completed", False),
    ]
    files = [sound_http.get(f"/v1/videos/{job['id']}/content").content for job in jobs]
    assert [streams(file) for file in files] == [["Video: h264", "Audio: aac"]] * 2 + [["Video: h264"]]
    assert sound_http.get(f"/v1/videos/{jobs[0]['id']}/content?variant=thumbnail").status_code == 200
    assert [stored_request(settings, job["id"])["generate_audio"] for job in jobs] == [True, True, False]
    silent = sound_http.post(f"/v1/videos/{jobs[2]['id']}/remix", json={"prompt": "another"}).json()
    assert silent["generate_audio"] is False


def test_model_without_sound_refuses_it_and_stores_nothing_of_it(http, settings):
    refused = create(http, generate_audio=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "generate_audio")
    assert "minimax-h3" in refused.json()["error"]["message"]  # A model that makes sound.
    for fields in ({}, {"generate_audio": False}):
        job = create(http, **fields).json()
        assert job["generate_audio"] is False
        assert "generate_audio" not in stored_request(settings, job["id"])


def test_model_says_whether_it_makes_sound_and_how_many_frames(sound_http, http):
    [model] = sound_http.get("/v1/models").json()["data"]
    assert (model["audio_rate"], model["defaults"]["generate_audio"]) == (RATE, True)
    assert (model["frame_step"], model["frame_offset"], model["limits"]["num_frames"]["minimum"]) == (17, 5, 5)
    for seconds, frames in (("0.1", 5), ("1", 22), ("1.5", 22), ("2.4", 39)):
        assert create(sound_http, seconds=seconds).json()["num_frames"] == frames
    [model] = http.get("/v1/models").json()["data"]
    assert model["audio_rate"] is None and "generate_audio" not in model["defaults"]


def test_what_a_model_fixes_has_one_value_and_its_licence_may_ask_for_a_name():
    described = describe_model(ServiceSettings(database="", storage="", model="h3"), H3, 0)
    assert described.display_name == "MiniMax H3"
    assert (described.defaults["fps"], described.defaults["generate_audio"]) == (24, True)
    limits = {name: (limit.minimum, limit.maximum) for name, limit in described.limits.items()}
    assert (limits["fps"], limits["num_frames"]) == ((24, 24), (107, 362))
    assert "guidance_scale" not in limits
    for seconds, frames in (("4", 107), ("5", 124), ("10", 243), ("15", 362)):
        assert count_frames(seconds, 24, H3) == frames


@pytest.mark.parametrize(("seconds", "nearest"), [("1", "4.46"), ("3", "4.46"), ("16", "15.08"), ("30", "15.08")])
def test_length_that_a_model_is_more_than_a_step_away_from_is_refused(seconds, nearest):
    with pytest.raises(InvalidRequest, match=rf"\b{nearest}\b") as refused:
        count_frames(seconds, 24, H3)
    assert refused.value.field == "seconds"


def test_answer_names_the_size_and_length_of_the_video_that_is_made(settings):
    first, last = ({"image_url": data_url(Image.new("RGB", (96, 64), colour))} for colour in ("red", "blue"))
    with serve(settings, H3) as address, open_client(address) as http:
        video = create(http, input_reference=first, last_frame=last, seconds="10").json()
        assert (video["size"], video["input_size"], video["last_frame_size"]) == ("1152x768", "96x64", "96x64")
        assert (video["num_frames"], video["fps"], video["seconds"]) == (243, 24, "10.12")
        assert stored_request(settings, video["id"])["frames"] == 243
        for fields, frames, seconds, warnings in (
            ({}, 124, "5.17", 0),
            ({"seconds": "4"}, 107, "4.46", 1),  # Further away than rounding explains.
            ({"seconds": "5"}, 124, "5.17", 0),
            ({"seconds": "15"}, 362, "15.08", 0),
        ):
            video = create(http, **fields).json()
            assert (video["num_frames"], video["seconds"], video["size"]) == (frames, seconds, "1344x768")
            assert len(video["warnings"]) == warnings
            assert http.get(f"/v1/videos/{video['id']}").json()["warnings"] == video["warnings"]
        assert create(http, seconds="30").json()["error"]["param"] == "seconds"
        video = create(http, last_frame=last).json()
        assert (video["size"], video["input_size"], video["last_frame_size"]) == ("1152x768", None, "96x64")
