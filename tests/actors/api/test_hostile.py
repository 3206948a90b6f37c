"""Clients that attack the service harm only themselves."""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from PIL import Image

from actors.api.core import following
from actors.api.core.service import Service
from actors.jobs.keys import KeyLimits, make_key, revoke_key
from actors.jobs.work import WorkQueue
from tests.actors.api.serving import bearer, change_limits, create, data_url, open_client, serve, working
from tests.conftest import PHOTO
from tests.waiting import wait_for


@pytest.fixture
def keys(database):
    """Return the headers of two clients with a key each."""
    return tuple(bearer(make_key(database, name)) for name in ("ann", "mallory"))


@contextlib.contextmanager
def open_limited(settings, **limits):
    """Serve the application with some limits, and yield a client."""
    limited = change_limits(settings, **limits)
    with serve(limited) as address, open_client(address) as http:
        yield http


class Sent:
    """A connection on which a request's head and part of its body were sent."""

    def __init__(self, http, lines, body=b""):
        parts = urlsplit(str(http.base_url))
        self._opened = socket.create_connection((parts.hostname, parts.port), timeout=20)
        self._answered = b""
        head = "\r\n".join([*lines, f"Host: localhost:{parts.port}", "", ""])
        with contextlib.suppress(ConnectionError):
            self._opened.sendall(head.encode() + body)
        self._opened.setblocking(False)

    @property
    def answered(self):
        """The answer so far."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._answered += self._opened.recv(65536)
        return self._answered

    @property
    def status(self):
        """The answer's status; None until there is an answer."""
        return int(answered.split()[1]) if (answered := self.answered) else None

    def close(self):
        self._opened.close()


def half_a_body(http, headers, size=10_000, sent=100, kind="application/json"):
    lines = ["POST /v1/videos HTTP/1.1", f"Content-Type: {kind}", f"Content-Length: {size}"]
    return Sent(http, [*lines, *(f"{name}: {value}" for name, value in headers.items())], b"x" * sent)


def test_a_large_body_costs_the_service_neither_memory_nor_time(settings):
    large = b"{" + b",".join(b'"k%d":0' % i for i in range(700_000)) + b"}"
    waits, ended = [], threading.Event()
    with open_limited(settings) as http:

        def poll():
            with httpx.Client(base_url=http.base_url, timeout=60) as other:
                while not (waits and ended.wait(0.05)):
                    start = time.monotonic()
                    assert other.get("/v1/videos").status_code == 200
                    waits.append(time.monotonic() - start)

        memory, most = psutil.Process().memory_info, 0
        before = memory().rss
        poller = threading.Thread(target=poll)
        poller.start()
        answer = http.post("/v1/videos", content=large, headers={"Content-Type": "application/json"})
        most = memory().rss - before
        ended.set()
        poller.join()
    assert answer.status_code == 400 and len(answer.content) < 1000
    assert max(waits) < 2, "others waited"
    assert most < 200_000_000  # Of 1.5 GB. What other tests of this process gave back, it takes again.


def test_bodies_that_never_end_are_counted_by_key_and_given_up(settings, keys):
    ann, mallory = keys
    with open_limited(settings, bodies=4, body_s=2.0) as http:
        started = [half_a_body(http, mallory) for _ in range(6)]
        wait_for(lambda: [sent.status for sent in started].count(429) == 2)
        assert create(http, ann).status_code == 200
        wait_for(lambda: [sent.status for sent in started].count(408) == 4)
        wait_for(lambda: create(http, mallory).status_code == 200)
        for sent in started:
            sent.close()


def test_key_with_most_memory_gives_it_back_first(settings, keys):
    ann, mallory = keys
    with open_limited(settings, bodies_bytes=1_000_000, image_bytes=600_000) as http:
        connections = [half_a_body(http, mallory, 500_000, 400_000) for _ in range(2)]
        time.sleep(0.3)
        answer = http.post("/v1/videos", headers=ann, data={"prompt": "x"}, files={"input_reference": b"x" * 450_000})
        assert answer.status_code == 400  # It was read to its end, and is no image.
        assert [sent.status for sent in connections].count(408) == 1
        for sent in connections:
            sent.close()


def test_one_key_takes_neither_the_whole_queue_nor_the_front_of_it(settings, keys, database):
    ann, mallory = keys
    with serve(dataclasses.replace(settings, queue_limit=20)) as address, open_client(address) as http:
        assert [create(http, mallory).status_code for _ in range(11)] == [200] * 10 + [429]
        refused = create(http, mallory, priority=100)
        assert refused.status_code == 429
        assert create(http, ann, priority=1).json()["error"]["param"] == "priority"
        for _ in range(10):
            assert create(http, ann).status_code == 200
        other = bearer(make_key(database, "bob", KeyLimits(waiting=1, priority=5)))
        wait_for(lambda: http.get("/v1/videos", headers=other).status_code == 200)
        assert create(http, other, priority=5).status_code == 200  # the queue is full, but it has less than its part
        assert create(http, other).json()["error"]["message"].startswith("this key has 1 jobs waiting")
    assert WorkQueue(database).claim("w").priority == 5


def test_a_full_queue_is_seen_before_a_body_is_read_and_leaves_nothing(settings):
    with serve(dataclasses.replace(settings, queue_limit=1)) as address, open_client(address) as http:
        assert create(http).status_code == 200
        refused = half_a_body(http, {}, size=20_000_000)
        wait_for(lambda: refused.status == 429)
        refused.close()
        image = {"input_reference": ("cat.png", PHOTO.read_bytes())}
        full = http.post("/v1/videos", data={"prompt": "x"}, files=image)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(full.headers["retry-after"]) <= 600
    assert [path for path in Path(settings.storage).rglob("*") if path.is_file()] == []


def test_a_full_disk_is_said_before_anything_is_accepted(settings):
    with open_limited(settings, free_bytes=2**60) as http:
        for answer in (http.get("/ready"), create(http)):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"]["code"] == "no_space"
        assert http.get("/metrics").status_code == 200


def test_client_that_hangs_up_is_no_failure_of_the_service(settings, caplog):
    with open_limited(settings) as http:
        half_a_body(http, {}).close()
        assert wait_for(lambda: 'status="499"' in http.get("/metrics").text)
        assert 'status="500"' not in http.get("/metrics").text
    assert "Traceback" not in caplog.text


def test_a_stream_ends_with_its_key(settings, keys, database):
    ann, _ = keys
    with serve(settings) as address, open_client(address) as http:
        job = create(http, ann).json()["id"]
        with http.stream("GET", f"/v1/videos/{job}/events", headers=ann) as stream:
            revoke_key(database, "ann")
            text = "".join(stream.iter_text())
        assert text.startswith("event: progress") and "event: error" in text and "invalid_api_key" in text


def test_however_many_follow_a_job_it_is_looked_at_once(settings, monkeypatch, engine):
    looks = []
    look = Service.look_at_all
    monkeypatch.setattr(Service, "look_at_all", lambda self, jobs: looks.append(list(jobs)) or look(self, jobs))
    monkeypatch.setattr(following, "_LOOK_S", 0.1)

    async def follow(address, job):
        async with (
            httpx.AsyncClient(base_url=address, timeout=30, limits=httpx.Limits(max_connections=60)) as http,
            asyncio.TaskGroup() as group,
        ):
            texts = [group.create_task(http.get(f"/v1/videos/{job}/events")) for _ in range(50)]
            while len(looks) <= 5:  # However long that takes on a slow machine.
                await asyncio.sleep(0.05)
            engine.go.set()
        return [answer.result().text for answer in texts]

    engine.go.clear()
    with serve(settings) as address, working(settings, engine), open_client(address) as http:
        job = create(http).json()["id"]
        start = time.monotonic()
        texts = asyncio.run(follow(address, job))
    assert all(text.rstrip().split("\n\n")[-1].startswith("event: completed") for text in texts)
    assert len(looks) <= (time.monotonic() - start) / 0.1 + 1 and all(ids == [job] for ids in looks)


def test_a_page_goes_on_after_its_last_video_was_deleted(http):
    ids = [create(http).json()["id"] for _ in range(5)]
    page = http.get("/v1/videos", params={"limit": 2}).json()
    assert http.delete(f"/v1/videos/{page['last_id']}").status_code == 200
    rest = http.get("/v1/videos", params={"after": page["last_id"]}).json()
    assert [video["id"] for video in rest["data"]] == ids[2::-1]
    assert http.get(f"/v1/videos/{page['last_id']}").status_code == 404


def test_files_are_their_user_s_own(settings, http):
    assert create(http).status_code == 200
    database = Path(settings.database)
    for file in database.parent.glob("jobs.sqlite*"):
        assert file.stat().st_mode & 0o077 == 0, file


def test_an_image_in_a_form_s_url_may_be_as_large_as_a_file(http):
    url = data_url(Image.effect_noise((600, 600), 90).convert("RGB"))
    assert len(url) > 200_000
    fields = {"prompt": (None, "x"), "input_reference[image_url]": (None, url)}
    assert http.post("/v1/videos", files=fields).json()["input_size"] == "600x600"
