"""What a worker's process holds in memory is counted."""

import time

from PIL import Image

from actors.api.worker import held_bytes
from actors.api.worker.held_bytes import LIMIT_BYTES
from tests.actors.api import serving
from tests.actors.api.serving import create, data_url, make_tail, open_client, serve, wait_for_end, working
from tests.actors.api.test_video_input import film
from tests.actors.small_spec import MOTION_SPEC, SmallSpec
from tests.waiting import wait_for


class CountingEngine(serving.Engine):
    """Notes what its worker holds while it makes a segment."""

    model = MOTION_SPEC

    async def generate(self, plan, **options):
        self.seen.append(self.tools.held.total)
        return await super().generate(plan, **options)


def test_the_end_that_a_segment_continues_counts(settings, tmp_path):
    engine = CountingEngine(tmp_path)
    engine.seen = []
    with working(settings, engine) as engine.tools, serve(settings, engine.model) as address:
        with open_client(address) as http:
            video = create(http, next_prompts=["on"], num_inference_steps=1, num_frames=39)
            assert wait_for_end(http, video.json()["id"])["status"] == "completed"
    assert engine.seen == [0, len(make_tail(engine.requests[0]).dump())]
    assert engine.tools.held.total == 0


def test_jobs_that_were_claimed_together_hold_no_more_than_the_limit(settings, tmp_path, monkeypatch):
    """The pictures of three jobs exceed it, those of two don't; a job that exceeds it by itself is alone."""
    engine = CountingEngine(tmp_path)
    engine.seen = []
    engine.go.clear()
    picture = 3 * 64 * 96
    looks = [{"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (96, 64), "teal"))}}]
    with serve(settings, engine.model) as address, open_client(address) as http:
        jobs = [create(http, input_references=looks * count).json()["id"] for count in (1, 1, 1, 2)]
        monkeypatch.setattr(held_bytes, "LIMIT_BYTES", 3 * picture)
        with working(settings, engine) as engine.tools:
            wait_for(lambda: engine.under_way == 2)
            time.sleep(0.6)
            assert engine.under_way == 2
            engine.go.set()
            assert all(wait_for_end(http, job)["status"] == "completed" for job in jobs)
            assert 2 * picture < max(engine.seen) <= 3 * picture and engine.tools.held.total == 0
            monkeypatch.setattr(held_bytes, "LIMIT_BYTES", picture)
            assert wait_for_end(http, create(http, input_references=looks).json()["id"])["status"] == "completed"


def test_worker_that_holds_too_much_claims_nothing(settings, tmp_path):
    engine = serving.Engine(tmp_path)
    with working(settings, engine) as tools, serve(settings, engine.model) as address, open_client(address) as http:
        with tools.held.hold(LIMIT_BYTES):
            job = create(http).json()["id"]
            time.sleep(0.6)
            assert http.get(f"/v1/videos/{job}").json()["status"] == "queued"
        assert wait_for_end(http, job)["status"] == "completed"


class Continues(SmallSpec):
    takes_video = continues_video = True
    frame_offset = 9


class WatchedEngine(serving.Engine):
    """Notes what its worker holds while it makes a video, and how much of that is the request's video."""

    model = Continues(serving.SPEC.config)

    async def generate(self, plan, **options):
        self.seen = self.tools.held.total, len(plan.request.video.content)
        return await super().generate(plan, **options)


def test_video_that_is_continued_counts_while_its_continuation_is_made(settings, tmp_path):
    engine, mp4 = WatchedEngine(tmp_path), film("-pix_fmt", "yuv420p")
    with working(settings, engine) as engine.tools, serve(settings, engine.model) as address:
        with open_client(address) as http:
            video = create(http, video=data_url(mp4, "video/mp4"))
            assert wait_for_end(http, video.json()["id"])["status"] == "completed"
        held, sent = engine.seen
        assert held == sent > 0
        assert engine.tools.held.total == 0
