"""A job that was made for a request which waits for it outlives that request if others wait for it, at any ingress."""

import contextlib

import pytest

from tests.actors.api.serving import open_client, serve
from tests.actors.api.test_acceptance import Waiting, open_service, status
from tests.waiting import wait_for


@contextlib.contextmanager
def following(address, path):
    """Receive the beginning of a stream, and close it at the end of the block."""
    with open_client(address) as http, http.stream("GET", path) as answer:
        assert answer.status_code == 200
        yield


@pytest.mark.parametrize(
    ("path", "elsewhere"),
    [(None, False), *((path, elsewhere) for path in ("content?stream=1", "events") for elsewhere in (False, True))],
)
def test_hang_up_cancels_only_a_video_that_nobody_else_waits_for(settings, path, elsewhere):
    with open_service(settings) as (service, http), serve(settings) as other, contextlib.ExitStack() as streams:
        waiting = Waiting(http, service)
        wait_for(lambda: service.following.count_followers(waiting.job) == 1)
        if path is not None:
            address = other if elsewhere else str(http.base_url)
            streams.enter_context(following(address, f"/v1/videos/{waiting.job}/{path}"))
        waiting.hang_up(followers=int(path == "events" and not elsewhere))
        if path is None:
            wait_for(lambda: status(http, waiting.job)["status"] == "failed")
        assert status(http, waiting.job)["status"] == ("failed" if path is None else "queued")
