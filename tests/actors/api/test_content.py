"""Downloads: the cost of clients that read slowly or not at all, and that a deletion cuts none off."""

import contextlib
import logging
import socket
import time
from pathlib import Path

import psutil

from actors.jobs.retention import Retention
from actors.jobs.work import WorkQueue
from tests.actors.api.serving import change_limits, create, open_client, serve
from tests.waiting import wait_for
from wan_tpu.storage.opening import open_storage

SIZE = 24_000_000  # More than the kernel's buffers of a connection hold.


@contextlib.contextmanager
def serving_a_video(settings, database, **limits):
    """Serve one completed video; yield a client, the video's id and its bytes."""
    limited = change_limits(settings, **limits)
    with serve(limited) as address, open_client(address) as http:
        job, queue = create(http).json()["id"], WorkQueue(database)
        video = bytes(range(256)) * (SIZE // 256)
        claimed = queue.claim("w")
        queue.announce(claimed, {"video.mp4": 1})
        open_storage(settings.storage).write("video.mp4", video)
        queue.complete(claimed, {"video": "video.mp4"})
        yield http, job, video


def unread(http, job):
    """A connection that requests a video and reads nothing."""
    opened = socket.create_connection((http.base_url.host, http.base_url.port), timeout=20)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    opened.sendall(f"GET /v1/videos/{job}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return opened


def test_downloads_that_nobody_reads_hold_little_memory(settings, database):
    with serving_a_video(settings, database) as (http, job, _), contextlib.ExitStack() as stack:
        memory = psutil.Process().memory_info
        for _ in range(3):
            stack.enter_context(unread(http, job)).recv(1, socket.MSG_PEEK)
        before = memory().rss
        for opened in [stack.enter_context(unread(http, job)) for _ in range(60)]:
            assert opened.recv(1, socket.MSG_PEEK)
        assert http.get("/health").status_code == 200
        assert memory().rss - before < 60 * 600_000


def test_client_that_stops_reading_is_left(settings, database, caplog):
    caplog.set_level(logging.INFO, "actors")
    with serving_a_video(settings, database, download_stall_s=0.2) as (http, job, video), unread(http, job) as opened:
        wait_for(lambda: any(record.getMessage() == "download cut" for record in caplog.records))
        received = b"".join(iter(lambda: opened.recv(1 << 20), b""))
        assert received.startswith(b"HTTP/1.1 200") and len(received) < len(video)
        assert http.get(f"/v1/videos/{job}/content").content == video
    # Of the service: threads that Ray Serve left in this process may fail at any time.
    failures = [record.name for record in caplog.records if record.exc_info]
    assert not [name for name in failures if name.startswith(("actors", "uvicorn"))]


def test_slow_client_that_goes_on_reading_gets_everything(settings, database):
    with serving_a_video(settings, database, download_stall_s=0.5) as (http, job, video):
        received = []
        with http.stream("GET", f"/v1/videos/{job}/content") as answer:
            for chunk in answer.iter_raw(2_000_000):
                received.append(chunk)
                time.sleep(0.06)  # All of it takes longer than a client may be silent.
    assert b"".join(received) == video


def test_deletion_during_a_download_does_not_cut_it(settings, database):
    headers = {"Range": "bytes=1000-23000000"}
    with serving_a_video(settings, database) as (http, job, video):
        with http.stream("GET", f"/v1/videos/{job}/content", headers=headers) as answer:
            chunks = answer.iter_raw()
            received = [next(chunks)]
            with open_client(http.base_url) as other:
                assert other.delete(f"/v1/videos/{job}").status_code == 200
            Retention(database, open_storage(settings.storage), settings.jobs).sweep()
            assert not (Path(settings.storage) / "video.mp4").exists()
            received += chunks
        assert b"".join(received) == video[1000:23_000_001]
        assert http.get(f"/v1/videos/{job}/content").status_code == 404
