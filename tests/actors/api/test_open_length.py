"""Videos whose length the model chooses: admitted by the longest, and answers say what was made."""

import dataclasses

import pytest

from tests.actors.api import serving
from tests.actors.api.serving import create, open_client, serve, wait_for_end, working
from tests.actors.small_spec import SPEC, SmallSpec
from wan_tpu.request import ResolvedRequest


class OpenSpec(SmallSpec):
    chooses_length = True

    def shorten(self, request: ResolvedRequest, seconds: float) -> ResolvedRequest:
        most = min(seconds, request.max_seconds)
        return dataclasses.replace(request, frames=self.nearest_frames(most * request.fps))


OPEN_SPEC = OpenSpec(SPEC.config)


class ChoosingEngine(serving.Engine):
    """Makes each video half a second long if its length is open."""

    model = OPEN_SPEC
    planned = ()

    async def generate(self, plan, **options):
        self.planned = (*self.planned, (plan.request.frames, plan.request.max_seconds))
        made = self.model.set_length(plan, 0.5) if plan.has_open_length else plan
        return dataclasses.replace(await super().generate(made, **options), frames=made.request.frames)


@pytest.fixture
def limited(settings):
    return dataclasses.replace(settings, largest=((64, 96, 49),))


@pytest.fixture
def open_http(limited):
    with serve(limited, OPEN_SPEC) as address, open_client(address) as http:
        yield http


def test_answer_has_the_longest_length_until_the_video_is_made(open_http, limited, tmp_path):
    """The operator's largest size shortens what the model may choose."""
    job = create(open_http).json()
    assert (job["num_frames"], job["max_seconds"]) == (49, 49 / 16)
    asked = create(open_http, max_seconds=2).json()
    assert (asked["num_frames"], asked["seconds"]) == (33, "2.06")
    given = create(open_http, num_frames=9).json()
    assert (given["num_frames"], given["max_seconds"]) == (9, None)
    refused = create(open_http, num_frames=9, max_seconds=2)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_seconds")
    assert create(open_http, size="960x640").status_code == 400  # No shorter video helps.
    several = create(open_http, next_prompts=["the ball falls"]).json()
    assert several["num_frames"] == SPEC.defaults.frames  # All segments have one length.
    engine = ChoosingEngine(tmp_path)
    with working(limited, engine):
        videos = [wait_for_end(open_http, each["id"]) for each in (job, asked, given)]
    assert [video["status"] for video in videos] == ["completed"] * 3, videos
    assert [(video["num_frames"], video["seconds"]) for video in videos] == [(9, "0.56")] * 3
    assert {*engine.planned[:3]} == {(49, 49 / 16), (33, 2), (9, None)}
    again = open_http.post(f"/v1/videos/{job['id']}/remix", json={"prompt": "another"}).json()
    assert (again["num_frames"], again["max_seconds"]) == (49, 49 / 16)
    shorter = dataclasses.replace(limited, largest=((64, 96, 33),))
    with serve(shorter, OPEN_SPEC) as address, open_client(address) as http:
        again = http.post(f"/v1/videos/{job['id']}/remix", json={"prompt": "shorter"}).json()
    assert (again["num_frames"], again["max_seconds"]) == (33, 33 / 16)  # Its worker reads `max_seconds` alone.
    continued = open_http.post("/v1/videos/extensions", json={"prompt": "on", "video": {"id": job["id"]}}).json()
    assert (continued["num_frames"], continued["max_seconds"]) == (9, None)
