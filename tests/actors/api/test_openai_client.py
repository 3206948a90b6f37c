"""OpenAI's own client against the service: create, poll, list, download, delete."""

import io
import subprocess

import httpx
import imageio_ffmpeg
import openai
import pytest
from PIL import Image

from actors.errors import RequestFailed
from tests.actors.api.serving import MODEL, wait_for
from tests.conftest import PHOTO


def frames_of(mp4):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "-", "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    return subprocess.run(command, input=mp4, capture_output=True, check=True).stdout


def test_a_video_from_nothing_to_the_end(client, worker, engine):
    made = client.videos.create_and_poll(
        prompt="A cat", size="96x64", seconds="1", model=MODEL, extra_body={"num_inference_steps": "3", "seed": "7"}
    )
    assert (made.status, made.progress, made.error) == ("completed", 100, None)
    assert (made.object, made.size, made.seconds, made.prompt, made.model) == ("video", "96x64", "1", "A cat", MODEL)
    assert made.completed_at >= made.created_at and made.expires_at > made.completed_at
    assert made.num_inference_steps == 3 and made.seed == 7 and made.num_frames == 17
    assert made.stage_seconds["denoise_high"] == pytest.approx(0.5, abs=0.01)
    assert made.chip_seconds == pytest.approx(0.25 + 2 * 0.25 * 4 + 0.25 * 8 + 0.25, abs=0.05)
    video = client.videos.download_content(made.id)
    assert video.content == engine.video(engine.asked[0])
    assert len(frames_of(video.content)) == 17 * 64 * 96
    assert client.videos.download_content(made.id, variant="video").content == video.content
    thumbnail = Image.open(io.BytesIO(client.videos.download_content(made.id, variant="thumbnail").content))
    assert (thumbnail.format, thumbnail.size) == ("WEBP", (96, 64))
    sheet = Image.open(io.BytesIO(client.videos.download_content(made.id, variant="spritesheet").content))
    assert (sheet.format, sheet.size) == ("JPEG", (4 * 96, 3 * 64))


def test_an_image_goes_with_the_form(client, worker, engine):
    made = client.videos.create_and_poll(prompt="It moves", input_reference=PHOTO)
    assert made.status == "completed"
    assert engine.asked[0].image.size == (96, 64)  # brought to the video's size at the door


def test_progress_is_told_and_never_falls(client, worker, engine):
    engine.go.clear()
    made = client.videos.create(prompt="slowly")
    assert (made.status, made.progress) == ("queued", 0)
    seen = wait_for(lambda: (v := client.videos.retrieve(made.id)).progress > 0 and v)
    assert (seen.status, seen.stage, seen.step) == ("in_progress", "denoise_high", 1)
    assert 0 < seen.progress < 100 and seen.eta_seconds > 0
    engine.go.set()
    assert client.videos.poll(made.id).progress == 100


def test_pages_of_a_list(client):
    ids = [client.videos.create(prompt=str(i)).id for i in range(7)]
    assert [video.id for video in client.videos.list(limit=3)] == ids[::-1]  # the client fetches page by page
    assert [video.id for video in client.videos.list(order="asc", limit=5)] == ids
    page = client.videos.list(after=ids[5], limit=2)
    assert ([video.id for video in page.data], page.has_more) == (ids[4:2:-1], True)
    assert (page.first_id, page.last_id) == (ids[4], ids[3])
    assert client.videos.list(after=ids[0]).last_id is None
    waiting = client.videos.retrieve(ids[4])
    assert (waiting.status, waiting.queue_position) == ("queued", 4)
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.videos.list(limit=101)
    with pytest.raises(openai.NotFoundError):
        client.videos.list(after="video_" + "0" * 48)


def test_delete(client, worker):
    made = client.videos.create_and_poll(prompt="soon gone")
    assert len(worker.store.get(made.id).results) == 3
    gone = client.videos.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "video.deleted")
    for ask in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
        with pytest.raises(openai.NotFoundError) as refused:
            ask(made.id)
        assert refused.value.code == "video_not_found"


def test_errors_have_openai_s_form(client, service):
    for given, param in (
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "size": "100x64"}, "size"),
        ({"prompt": "x", "seconds": "never"}, "seconds"),
        ({"prompt": "x", "model": "sora-2"}, "model"),
        ({"prompt": "x", "extra_body": {"surprise": "1"}}, "surprise"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.videos.create(**given)
        assert (refused.value.type, refused.value.param) == ("invalid_request_error", param)
        assert "error" in refused.value.response.json()
    with pytest.raises(openai.BadRequestError, match="96x64"):
        client.videos.create(prompt="x", size="100x64")
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "wan-tpu"
    answer = httpx.get(f"{service}/v1/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_a_size_that_the_slices_refuse_fails_alone_and_names_the_nearest_that_fits(client, worker, engine):
    said = "1280x720 with 81 frames doesn't fit the memory of the slice; the nearest known to fit is 832x480 with 81"
    engine.failure = RequestFailed(said, "invalid")
    made = client.videos.create_and_poll(prompt="too large")
    assert (made.status, made.error.code, made.error.message, made.attempts) == ("failed", "invalid", said, 1)
    engine.failure, engine.warnings = None, ("the prompt was cut",)
    other = client.videos.create_and_poll(prompt="small")
    assert (other.status, other.warnings) == ("completed", ["the prompt was cut"])


def test_failed_work_is_a_failed_video(client, worker, engine):
    engine.failure = RequestFailed("the decoder gave NaN", "unhealthy")
    made = client.videos.create_and_poll(prompt="bad")
    assert (made.status, made.error.code) == ("failed", "unhealthy")
    assert "NaN" in made.error.message
    with pytest.raises(openai.NotFoundError, match="failed"):
        client.videos.download_content(made.id)
