"""An ingress that is killed while videos are watched costs their viewers a reconnect, and no byte of what they have."""

import multiprocessing
import socket

import httpx
import pytest
import uvicorn

from actors.api.core.service import Service
from actors.api.http.app import make_app
from tests.actors.api.serving import DecodingEngine, working
from tests.actors.api.test_watching import FRAMES, count_frames, media_of, watching
from tests.actors.small_spec import SPEC
from tests.waiting import wait_for

pytestmark = pytest.mark.soak


def serve(settings, port):
    """Run an ingress: the body of a process."""
    uvicorn.run(make_app(Service(settings, SPEC)), host="127.0.0.1", port=port, log_level="warning")


class Ingress:
    """An ingress in a process of its own, which can be killed and started again at the same address."""

    def __init__(self, settings):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._settings, self._port = settings, free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self):
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(self._settings, self._port))
        self._process.start()
        wait_for(self._answers)

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self._process.join()

    def _answers(self):
        try:
            return httpx.get(f"{self.address}/health", timeout=60).status_code == 200
        except httpx.TransportError:
            return False


def test_viewer_of_a_killed_ingress_reconnects_and_has_kept_valid_bytes(settings, tmp_path):
    engine, ingress = DecodingEngine(tmp_path), Ingress(settings)
    engine.decoded.release(2)
    try:
        with working(settings, engine), httpx.Client(base_url=ingress.address, timeout=30) as http:
            with watching(http) as (job, first):
                wait_for(lambda: len(engine.fragments[job]) == 2)
                wait_for(lambda: media_of(first.received) == media_of(*engine.fragments[job]))
                ingress.kill()
                received, cut = first.end()
            assert (cut, count_frames(received)) == (True, 32)
            ingress.start()
            with watching(http, job) as (_, second):
                wait_for(lambda: second.received == received)
                engine.decoded.release(3)
                content, cut = second.end()
            assert (cut, count_frames(content)) == (False, FRAMES) and content.startswith(received)
            assert http.get(f"/v1/videos/{job}").json()["attempts"] == 1
    finally:
        ingress.kill()
