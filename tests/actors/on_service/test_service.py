"""OpenAI's client against the service on an emulated cluster; and the processes of the service killed meanwhile."""

import dataclasses
import functools
import threading

import httpx
import openai
import pytest

from actors.api.deploy import ServiceStartFailed, deploy_service
from actors.jobs.database import Database
from actors.jobs.store import JobStore
from actors.jobs.watching import list_fragments
from tests import waiting
from tests.actors.api.test_openai_client import frames_of
from tests.actors.on_service.conftest import free_port
from tests.conftest import PHOTO
from tests.waiting import SECONDS

pytestmark = pytest.mark.long

STEPS = 600  # 10 ms each, and told once a second
wait_for = functools.partial(waiting.wait_for, pause_s=0.2)  # An answer costs the service and its client 10 ms.
ASKED = {"prompt": "A cat looks into the camera", "size": "64x64"}


def build_arguments(steps, frames=9, **fields):
    return ASKED | {"extra_body": {"num_frames": str(frames), "num_inference_steps": str(steps), "seed": "3", **fields}}


def create(client, steps, **fields):
    return client.videos.create(input_reference=PHOTO, **build_arguments(steps, **fields))


def poll(client, video):
    return wait_for(lambda: (v := client.videos.retrieve(video.id)).status in ("completed", "failed") and v)


@pytest.fixture(scope="module")
def video(online):
    """A job that nothing disturbed."""
    with online.client() as client:
        return client.videos.create_and_poll(input_reference=PHOTO, **build_arguments(STEPS))


@pytest.fixture(scope="module")
def undisturbed_video(online, video):
    """Its video."""
    with online.client() as client:
        return client.videos.download_content(video.id).content


def test_openai_s_client_gets_lists_and_deletes_a_video(online, video, undisturbed_video):
    with online.client() as client:
        assert (video.status, video.progress, video.size) == ("completed", 100, "64x64")
        assert set(video.stage_seconds) == {"encoder", "denoise_high", "denoise_low", "decoder"}
        assert len(frames_of(undisturbed_video)) == 9 * 64 * 64
        assert client.videos.download_content(video.id, variant="thumbnail").content[8:12] == b"WEBP"
        assert video.id in [each.id for each in client.videos.list(limit=5)]
        assert ["64x64" in warning for warning in video.warnings] == [True]  # The photograph is cropped.
        url, options = f"{online.address}/v1/videos/{video.id}/content", {"timeout": SECONDS}
        part = httpx.get(url, headers={"Range": "bytes=100-199"}, **options)
        assert (part.status_code, part.content) == (206, undisturbed_video[100:200])
        assert part.headers["content-range"] == f"bytes 100-199/{len(undisturbed_video)}"
        assert httpx.get(url, headers={"If-None-Match": part.headers["etag"]}, **options).status_code == 304
        assert client.videos.delete(video.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video.id)


@pytest.mark.parametrize(("host", "other_port"), [("127.0.0.2", False), ("127.0.0.1", True)])
def test_another_address_than_the_proxy_s_is_refused_at_once(online, host, other_port):
    port = online.port
    with pytest.raises(ServiceStartFailed, match=f"--port {port}"):
        deploy_service(online.settings, online.spec, host=host, port=free_port() if other_port else port)
    assert httpx.get(f"{online.address}/health", timeout=60).status_code == 200


@pytest.mark.soak
def test_events_pass_haproxy_as_they_happen(online):
    with online.client() as client, httpx.Client(base_url=online.address, timeout=SECONDS) as http:
        video = create(client, STEPS)
        with http.stream("GET", f"/v1/videos/{video.id}/events") as answer:
            names = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
        assert names[-1] == "completed" and names.count("progress") >= 2


def test_video_is_watched_through_haproxy_while_it_is_decoded(online):
    with online.client() as client, httpx.Client(base_url=online.address, timeout=SECONDS) as http:
        video = create(client, 200)
        with http.stream("GET", f"/v1/videos/{video.id}/content", params={"stream": 1}) as answer:
            assert client.videos.retrieve(video.id).status != "completed"
            content = b"".join(answer.iter_raw())
        assert poll(client, video).status == "completed"
        assert list_fragments(Database(online.settings.database), video.id)
        assert frames_of(content) == frames_of(client.videos.download_content(video.id).content)


def test_job_survives_a_killed_worker_and_a_killed_ingress(online, undisturbed_video):
    with online.client(max_retries=0) as client:
        video = create(client, STEPS)
        wait_for(lambda: (client.videos.retrieve(video.id).step or 0) > 100)
        online.kill("ServiceWorker")
        wait_for(lambda: client.videos.retrieve(video.id).attempts > 1)
        killed = online.kill("Ingress")
        wait_for(lambda: not killed.is_running())

        def answers():
            try:
                return client.videos.retrieve(video.id).status == "completed"
            except openai.APIError:
                return False

        wait_for(answers)
        assert client.videos.download_content(video.id).content == undisturbed_video
        went_on = [
            entry["step"] for entry in online.read_events() if entry["event"] == "goes on" and entry["job"] == video.id
        ]
        assert went_on and min(went_on) > 9  # from a snapshot, of which every tenth step begins one
        results = JobStore(Database(online.settings.database)).get(video.id).results
        assert results.keys() == {"video", "thumbnail", "spritesheet", "final_frame"}


@pytest.mark.thorough
def test_continued_video_whose_worker_is_killed_goes_on_within_its_segment(online):
    with online.client() as client:
        first = client.videos.create_and_poll(input_reference=PHOTO, **build_arguments(4))
        more = {"video": {"id": first.id}, "num_frames": "5", "num_inference_steps": str(STEPS)}
        more["next_prompts"] = ["and on"]
        second = client.videos.extend(prompt="It goes on", seconds=openai.omit, video=openai.omit, extra_body=more)
        wait_for(lambda: (now := client.videos.retrieve(second.id)).finished_segments and (now.step or 0) > 100)
        online.kill("ServiceWorker")
        ended = poll(client, second)
        assert (ended.status, ended.attempts, ended.finished_segments) == ("completed", 2, 2)
        # Two segments, and less than one more that the killed worker had begun: the first one wasn't made again.
        steps = [
            entry["step"] for entry in online.read_events() if entry["event"] == "goes on" and entry["job"] == second.id
        ]
        assert steps and min(steps) > 9
        source, whole = (frames_of(client.videos.download_content(video.id).content) for video in (first, second))
        assert len(whole) == (9 + 2 * (5 - 1)) * 64 * 64 and whole.startswith(source)


def test_a_cancelled_job_frees_its_slice(online):
    with online.client() as client:
        video = create(client, 1000)
        wait_for(lambda: (client.videos.retrieve(video.id).step or 0) > 3)
        client.post(f"/videos/{video.id}/cancel", cast_to=object)
        ended = poll(client, video)
        assert (ended.status, ended.error.code) == ("failed", "cancelled")
        assert poll(client, create(client, 2)).status == "completed"


def test_a_rolling_update_loses_no_job_and_refuses_none(online):
    """Both applications are replaced while jobs run and a client asks all the time."""
    with online.client(max_retries=0) as client, httpx.Client(base_url=online.address, timeout=SECONDS) as http:
        jobs = [create(client, 400) for _ in range(2)]
        wait_for(lambda: client.videos.retrieve(jobs[0].id).step)
        refused, ended = [], threading.Event()

        def ask():
            while not ended.wait(0.1):
                try:
                    answer = http.get(f"/v1/videos/{jobs[0].id}")
                    if answer.status_code != 200:
                        refused.append(answer.text)
                except httpx.TransportError as error:
                    refused.append(repr(error))

        asking = threading.Thread(target=ask)
        asking.start()
        changed = dataclasses.replace(online.settings, queue_limit=999)
        deploy_service(changed, online.spec, host="127.0.0.1", port=online.port)
        ends = [poll(client, job) for job in jobs]
        ended.set()
        asking.join()
        assert [end.status for end in ends] == ["completed", "completed"]
        assert refused == []
        first, second = (client.videos.download_content(job.id).content for job in jobs)
        assert first == second and len(frames_of(first)) == 9 * 64 * 64
