"""No callback of the ingress's event loop takes more than 20 ms, however large a client's request is."""

import asyncio.events
import gc
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn

from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.api.untrusted.body_parts import FORM
from actors.jobs.store import JobStore
from actors.jobs.tables import Job
from tests.actors.api import fetching
from tests.actors.api.conftest import NAME
from tests.actors.api.serving import create
from tests.actors.small_spec import SPEC
from tests.conftest import PHOTO
from tests.waiting import wait_for

MOST_S = 0.04  # The longest takes 10 to 25 ms, by how much its core shares with the other one.
LONG = "ä" * 32_000


class Loop:
    """The callbacks of a thread's event loop that took longest: seconds of the processor, and what they were.

    The processor's time of that thread alone, since others of this machine and process take turns with it.
    """

    def __init__(self):
        self.thread, self.longest = None, (0.0, "")

    def reset(self):
        self.longest = (0.0, "")


@pytest.fixture
def loop(monkeypatch):
    measured, run = Loop(), asyncio.events.Handle._run

    def measure_run(handle):
        if threading.get_ident() != measured.thread:
            return run(handle)
        start = time.thread_time()
        try:
            return run(handle)
        finally:
            took = time.thread_time() - start
            if took > measured.longest[0]:
                measured.longest = took, repr(handle)

    monkeypatch.setattr(asyncio.events.Handle, "_run", measure_run)
    gc.collect()
    gc.disable()  # A collection falls on whichever thread runs, and this process holds far more than an ingress.
    yield measured
    gc.enable()


@pytest.fixture
def http(hook_settings, loop):
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(Service(hook_settings, SPEC)), loop="asyncio", log_level="warning")
    server = uvicorn.Server(config)

    def serve():
        loop.thread = threading.get_ident()
        server.run(sockets=[listening])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60) as client:
        assert create(client, seed=1).status_code == 200  # Everything that is imported and built once is ready now.
        assert client.get("/v1/videos").status_code == 200
        yield client
    server.should_exit = True
    thread.join(20)
    listening.close()


def plans(http, hook):
    """Return requests with long schedules, all different."""
    return [
        lambda: create(http, num_inference_steps=1000, shift=1 + random.random(), guidance_scale=4) for _ in range(10)
    ]


def bodies(http, hook):
    """Return the slowest bodies that are still parsed in this process, and a large one with the longest texts."""

    def form(content):
        return lambda: http.post("/v1/videos", content=content, headers={"Content-Type": f"{FORM}; boundary=x"})

    def as_json(content):
        return lambda: http.post("/v1/videos", content=content, headers={"Content-Type": "application/json"})

    small = 32_000
    return [
        form(b"--x\r\n" * (small // 5)),
        form(b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n" + b"\r\n--" * (small // 4) + b"\r\n--x--\r\n"),
        as_json(b"[" * small),
        as_json(b'{"prompt": "x", "sigmas": [' + b"1," * (small // 2 - 30) + b"1]}"),
        as_json(json.dumps({"prompt": "x", "loras": [{"name": "a"}] * 1000}).encode()),
        as_json(json.dumps({"prompt": LONG, "negative_prompt": LONG}).encode()),
        as_json(json.dumps({"prompt": LONG, "cache": "x" * 200_000, "solver": "y" * 200_000}).encode()),
    ]


def addresses(http, hook):
    """Return requests with URLs whose hosts are hard to parse, and one whose image is fetched by name."""
    hook.answers["/a.png"] = fetching.answer(PHOTO.read_bytes())
    hard = "https://" + ".".join(["ä" * 20] * 90) + "/a.png"
    urls = [hard, "https://" + "ä" * 480_000, f"https://{NAME}:{hook.port}/a.png", f"https://{NAME}:{hook.port}/a.png"]
    return [
        *(lambda url=url: create(http, input_reference={"image_url": url}) for url in urls),
        lambda: create(http, webhook_url=hard[:2000]),
    ]


def pages(http, hook):
    """Return requests for lists of jobs and single jobs with the longest prompts, and for a stream of events."""
    job = create(http, prompt=LONG, negative_prompt=LONG).json()["id"]

    def first_event():
        with http.stream("GET", f"/v1/videos/{job}/events") as answer:
            next(answer.iter_lines())

    paths = ["/v1/videos?limit=100", f"/v1/videos/{job}", "/v1/videos?limit=100&order=asc", "/metrics", "/v1/models"]
    return [*(lambda path=path: http.get(path) for path in paths), first_event]


def test_no_callback_of_an_ingress_takes_long(http, hook, loop, database):
    for requests in (plans, bodies, addresses, pages):
        if requests is pages:
            long_jobs(http, database, 100)
        calls = requests(http, hook)
        loop.reset()
        with ThreadPoolExecutor(10) as threads:
            for answer in threads.map(lambda ask: ask(), calls):
                assert answer is None or answer.status_code < 500, answer.text
        took, handle = loop.longest
        assert 0 < took < MOST_S, (requests.__name__, handle)


def long_jobs(http, database, count):
    """Submit jobs with the longest prompts that are accepted."""
    store = JobStore(database)
    request = store.list(limit=1).jobs[0].request | {"prompt": LONG, "negative_prompt": LONG}
    return [store.submit(Job(owner="", request=request))[0].id for _ in range(count)]
