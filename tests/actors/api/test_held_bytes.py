"""What a worker's process holds in memory is counted."""

import time

from actors.api.worker.held_bytes import LIMIT_BYTES
from tests.actors.api import serving
from tests.actors.api.serving import create, data_url, make_tail, open_client, serve, wait_for_end, working
from tests.actors.api.test_video_input import film
from tests.actors.small_spec import MOTION_SPEC, SmallSpec


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
    assert engine.seen == [0, make_tail(engine.requests[0]).nbytes]
    assert engine.tools.held.total == 0


def test_worker_that_holds_too_much_claims_nothing(settings, tmp_path):
    engine = serving.Engine(tmp_path)
    with working(settings, engine) as tools, serve(settings, engine.model) as address, open_client(address) as http:
        with tools.held.hold(LIMIT_BYTES):
            job = create(http).json()["id"]
            time.sleep(1)
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
