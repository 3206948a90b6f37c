"""OpenAI's own client against the service: create, poll, list, download, delete."""

import dataclasses
import io
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import imageio_ffmpeg
import openai
import pytest
from openai import OpenAI
from PIL import Image

from actors.api.http.job_failures import MEANINGS
from actors.errors import RequestFailed
from actors.jobs.keys import KeyLimits, limit_key, make_key
from actors.jobs.work import WorkQueue
from tests.actors.api.serving import (
    MODEL,
    bearer,
    change_reliability,
    create,
    open_client,
    serve,
    wait_for_end,
    working,
)
from tests.conftest import PHOTO
from tests.waiting import wait_for


def frames_of(mp4):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "-", "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    return subprocess.run(command, input=mp4, capture_output=True, check=True).stdout


def test_a_video_from_nothing_to_the_end(client, worker, engine):
    video = client.videos.create_and_poll(
        prompt="A cat", size="96x64", seconds="1", model=MODEL, extra_body={"num_inference_steps": "3", "seed": "7"}
    )
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert (video.object, video.size, video.seconds) == ("video", "96x64", "1.06")
    assert (video.prompt, video.model) == ("A cat", MODEL)
    assert video.completed_at >= video.created_at and video.expires_at > video.completed_at
    assert video.num_inference_steps == 3 and video.seed == 7 and video.num_frames == 17
    assert video.stage_seconds["denoise_high"] == pytest.approx(0.5, abs=0.01)
    assert video.chip_seconds == pytest.approx(0.25 + 2 * 0.25 * 4 + 0.25 * 8 + 0.25, abs=0.05)
    downloaded = client.videos.download_content(video.id)
    assert downloaded.content == engine.video(engine.requests[0])
    assert len(frames_of(downloaded.content)) == 17 * 64 * 96
    assert client.videos.download_content(video.id, variant="video").content == downloaded.content
    thumbnail = Image.open(io.BytesIO(client.videos.download_content(video.id, variant="thumbnail").content))
    assert (thumbnail.format, thumbnail.size) == ("WEBP", (96, 64))
    sheet = Image.open(io.BytesIO(client.videos.download_content(video.id, variant="spritesheet").content))
    assert (sheet.format, sheet.size) == ("JPEG", (4 * 96, 3 * 64))
    deletion = client.videos.delete(video.id)
    assert (deletion.id, deletion.deleted, deletion.object) == (video.id, True, "video.deleted")
    for ask in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
        with pytest.raises(openai.NotFoundError) as refused:
            ask(video.id)
        assert refused.value.code == "video_not_found"


def test_pages_of_a_list(client):
    ids = [client.videos.create(prompt=str(i)).id for i in range(7)]
    assert [video.id for video in client.videos.list(limit=3)] == ids[::-1]  # The client fetches page by page.
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


def test_errors_have_openai_s_form(client, service):
    for fields, param in (
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "size": "100x64"}, "size"),
        ({"prompt": "x", "seconds": "never"}, "seconds"),
        ({"prompt": "x", "model": "sora-2"}, "model"),
        ({"prompt": "x", "extra_body": {"surprise": "1"}}, "surprise"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.videos.create(**fields)
        assert (refused.value.type, refused.value.param) == ("invalid_request_error", param)
        assert "error" in refused.value.response.json()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "wan-tpu"
    answer = httpx.get(f"{service}/v1/nothing", timeout=60)
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_a_remix_is_the_same_request_with_another_prompt(client, worker, engine):
    first = client.videos.create_and_poll(
        prompt="a cat", size="96x64", seconds="1", input_reference=PHOTO, extra_body={"seed": "7"}
    )
    second = client.videos.poll(client.videos.remix(first.id, prompt="a dog").id)
    assert (second.status, second.prompt, second.remixed_from_video_id) == ("completed", "a dog", first.id)
    assert (second.seconds, second.size, second.seed, second.input_size) == ("1.06", "96x64", 7, first.input_size)
    assert engine.requests[1].image.tobytes() == engine.requests[0].image.tobytes()
    client.videos.delete(first.id)
    assert client.videos.retrieve(second.id).status == "completed"
    with pytest.raises(openai.NotFoundError):
        client.videos.remix(first.id, prompt="a cow")
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.remix(second.id, prompt="a cow", extra_body={"seed": 9})
    assert refused.value.param == "seed"


@pytest.mark.parametrize("video", [b"x", bytes(3_000_000)])
def test_unsupported_endpoint_names_one_that_does_something_like_it(client, video):
    for ask in (
        lambda: client.videos.edit(video=video, prompt="x"),
        lambda: client.videos.create_character(name="x", video=video),
        lambda: client.videos.get_character("one"),
    ):
        with pytest.raises(openai.BadRequestError, match=r"remix|input_reference") as refused:
            ask()
        assert refused.value.code == "unsupported"


def test_an_alias_is_the_model(settings):
    with serve(dataclasses.replace(settings, aliases=("sora-2",))) as address:
        with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            for name in ("sora-2", "default"):  # The second is what SGLang's clients send.
                assert client.videos.create(prompt="x", model=name).model == MODEL
            models = {model.id: model.alias_of for model in client.models.list()}
            assert models == {MODEL: None, "sora-2": MODEL}  # n8n offers only listed ids that contain "sora".
            assert client.models.retrieve("sora-2").alias_of == MODEL
            with pytest.raises(openai.BadRequestError):
                client.videos.create(prompt="x", model="sora-3")


def test_a_short_video_in_one_call(http, worker, engine):
    answer = http.post("/v1/videos/sync", json={"prompt": "x"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
    assert answer.content == http.get(f"/v1/videos/{answer.headers['x-video-id']}/content").content
    engine.failure = RequestFailed("the decoder gave NaN", "unhealthy")
    failed = http.post("/v1/videos/sync", json={"prompt": "x"})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "unhealthy")


def test_every_reason_of_a_failure_has_a_status_of_its_own(http, database):
    """Only 503 should be repeated. For others, the same video would be computed again in vain."""
    statuses = {"invalid": 400, "deadline_exceeded": 408, "cancelled": 409, "lost": 503, "input_lost": 503}
    work = WorkQueue(database)

    def ask_for(code):
        return http.post("/v1/videos/sync", json={"prompt": code})

    with ThreadPoolExecutor(len(MEANINGS)) as pool:
        answers = {code: pool.submit(ask_for, code) for code in MEANINGS}
        for _ in MEANINGS:
            job = wait_for(lambda: work.claim("w"))
            work.fail(job, job.request["prompt"], "no")
        for code, answer in answers.items():
            status = statuses.get(code, 500)
            assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (status, code)
            assert answer.result().headers.get("x-should-retry") == (None if status == 503 else "false")


def test_one_that_takes_longer_is_polled_for(settings, engine):
    engine.go.clear()
    short = change_reliability(settings, answer_s=0.5)
    with serve(short) as address, working(short, engine), open_client(address) as http:
        late = http.post("/v1/videos/sync", json={"prompt": "x"})
        assert late.status_code == 202
        assert late.json()["status"] in ("queued", "in_progress")  # A slow worker hasn't claimed it yet.
        wait_for(lambda: http.get(f"/v1/videos/{late.json()['id']}").json()["status"] == "in_progress")


def test_heads_and_slashes_are_answered_as_clients_expect(http, worker):
    job = create(http).json()["id"]
    wait_for_end(http, job)
    whole = http.get(f"/v1/videos/{job}/content")
    head = http.head(f"/v1/videos/{job}/content")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content)) and head.headers["etag"] == whole.headers["etag"]
    for path in (f"/v1/videos/{job}", "/v1/videos", "/v1/models", "/health"):
        assert (http.head(path).status_code, http.head(path).content) == (200, b"")
    for end in ("", "/"):
        assert http.head(f"/v1/videos/{job}/events{end}").status_code == 405
    assert http.get("/v1/videos/").json() == http.get("/v1/videos").json()
    assert http.post("/v1/videos/", json={"prompt": "x"}).status_code == 200
    ids = [video["id"] for video in http.get("/v1/videos", params={"status": "completed"}).json()["data"]]
    assert ids[-1] == job and all(http.get(f"/v1/videos/{id_}").json()["status"] == "completed" for id_ in ids)
    assert http.get("/v1/videos", params={"status": "lost"}).status_code == 400


def test_keys_do_what_their_scopes_say_and_an_operator_sees_all(settings, database, engine):
    def key(name, *scopes, **limits):
        return bearer(make_key(database, name, KeyLimits(scopes=scopes, **limits)))

    maker, reader = key("maker", "make", "read"), key("reader", "read", requests_per_minute=60)
    operator, expiring = key("operator", "operate"), key("gone", "make", "read", days=0.001)
    priced = dataclasses.replace(settings, dollars={"denoise_high": 2.7, "denoise_low": 2.7})
    with serve(priced) as address, working(priced, engine), open_client(address) as http:
        job = create(http, maker).json()["id"]
        for who in (reader, operator):
            refused = create(http, who)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")
        assert http.get(f"/v1/videos/{job}", headers=reader).status_code == 404
        seen = wait_for(lambda: (v := http.get(f"/v1/videos/{job}", headers=operator).json())["progress"] == 100 and v)
        assert http.post(f"/v1/videos/{job}/cancel", headers=operator).json()["status"] == "completed"
        limited = http.get("/v1/videos", headers=reader).headers
        assert limited["x-ratelimit-limit-requests"] == "60" and int(limited["x-ratelimit-remaining-requests"]) < 10
        [mine] = http.get("/v1/usage", headers=maker).json()["data"]
        assert (mine["name"], mine["videos"], mine["failed"]) == ("maker", 1, 0)
        assert mine["chip_seconds"] == pytest.approx(seen["chip_seconds"], abs=0.01)
        assert mine["dollars"] == pytest.approx((mine["chip_seconds"] - 0.5) * 2.7 / 3600, rel=0.01)
        assert http.get("/v1/usage", headers=operator).json()["data"] == [mine]
        assert http.get("/v1/usage", headers=reader).json()["data"] == []
        [then] = http.get("/v1/usage", headers=maker, params={"last": "2001-01-01"}).json()["data"]
        assert (then["videos"], then["stored_bytes"]) == (0, mine["stored_bytes"])
        assert f'wan_key_videos_total{{key="{mine["key"]}"}} 1.0' in http.get("/metrics", headers=operator).text
        http.delete(f"/v1/videos/{job}", headers=operator)
        [after] = http.get("/v1/usage", headers=maker).json()["data"]
        assert after | {"stored_bytes": mine["stored_bytes"]} == mine  # Usage outlives the job.
        assert http.get("/v1/videos", headers=expiring).status_code == 200
        limit_key(database, "gone", {"days": -1.0})
        expired = wait_for(lambda: (a := http.get("/v1/videos", headers=expiring)).status_code == 401 and a)
        assert expired.json()["error"]["code"] == "invalid_api_key"
        schemes = http.get("/openapi.json").json()["components"]["securitySchemes"]
        assert [scheme["scheme"] for scheme in schemes.values()] == ["bearer"]
