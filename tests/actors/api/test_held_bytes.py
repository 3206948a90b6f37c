"""What a worker's process holds in memory is counted."""

import base64

from tests.actors.api import serving
from tests.actors.api.serving import create, open_client, serve, wait_for_end, working
from tests.actors.api.test_video_input import film
from tests.actors.small_spec import SmallSpec


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
            video = create(http, video=f"data:video/mp4;base64,{base64.b64encode(mp4).decode()}")
            assert wait_for_end(http, video.json()["id"])["status"] == "completed"
        held, sent = engine.seen
        assert held == sent > 0
        assert engine.tools.held.total == 0
