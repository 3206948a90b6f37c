"""Videos are watched while they are decoded: over HTTP, with a real worker, and real fragments of real videos."""

import contextlib
import hashlib
import logging
import re
import socket
import subprocess
import threading
import time

import httpx
import imageio_ffmpeg
import psutil
import pytest

from actors.api.http import watching as watching_module
from actors.jobs.keys import make_key, revoke_key
from actors.jobs.tables import StoredFragment
from actors.jobs.work import WorkQueue
from tests.actors.api import serving
from tests.actors.api.serving import bearer, create, open_client, serve, wait_for_end, working
from tests.waiting import wait_for
from wan_tpu.media.boxes import FREE, list_boxes
from wan_tpu.media.fragments import FragmentSplitter
from wan_tpu.storage.opening import open_storage

FRAMES = 65  # Five fragments.


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "frames").mkdir()
    return serving.DecodingEngine(tmp_path / "frames")


class Viewer(threading.Thread):
    """A client that watches a video; `received` grows, and `cut` says whether the answer ended too early."""

    def __init__(self, address, job, headers=None):
        super().__init__(daemon=True)
        self._address, self._job, self._headers = address, job, headers
        self.received, self.times = b"", []
        self.answer = self.cut = None

    def run(self):
        path = f"/v1/videos/{self._job}/content"
        with (
            httpx.Client(base_url=self._address, timeout=60, headers=self._headers) as http,
            http.stream("GET", path, params={"stream": 1}) as answer,
        ):
            self.answer, self.cut = answer, False
            try:
                for chunk in answer.iter_raw():
                    self.received += chunk
                    self.times.append(time.monotonic())
            except httpx.RemoteProtocolError:
                self.cut = True

    def end(self):
        """Wait for the end of the answer; return what was received, and whether it was cut."""
        self.join(30)
        assert not self.is_alive()
        return self.received, self.cut


@contextlib.contextmanager
def watching(http, job=None, **fields):
    """Create a job, and watch it; yield its id and the viewer."""
    job = job or create(http, num_frames=FRAMES, **fields).json()["id"]
    viewer = Viewer(str(http.base_url), job)
    viewer.start()
    wait_for(lambda: viewer.answer is not None)
    yield job, viewer


def count_frames(content):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "-", "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    decoded = subprocess.run(command, input=content, capture_output=True)
    assert not decoded.stderr, decoded.stderr
    return len(decoded.stdout) // (64 * 96)


def media_of(*fragments):
    """Return the packets of fragments, one after the other: a worker writes the boxes around them anew."""
    content = b"".join(fragments)
    return b"".join(content[box.content : box.stop] for box in list_boxes(content) if box.kind == b"mdat")


def list_stored_fragments(settings):
    """Return the names of the fragments in storage."""
    return [name for name in open_storage(settings.storage).list() if re.search(r"\.\d+-\d{4}\.", name)]


def test_video_is_watched_while_it_is_decoded(http, settings, engine, worker):
    engine.go.clear()
    with watching(http) as (job, viewer):
        assert (viewer.answer.status_code, viewer.answer.headers["content-type"]) == (200, "video/mp4")
        assert viewer.answer.headers["cache-control"] == "no-store"
        wait_for(lambda: http.get(f"/v1/videos/{job}").json()["step"])  # By then the worker knows of the viewer.
        assert (viewer.received, list_stored_fragments(settings)) == (b"", [])
        engine.go.set()
        for count in range(1, 4):
            engine.decoded.release()
            wait_for(lambda count=count: len(list_stored_fragments(settings)) == count)
            wait_for(lambda: media_of(viewer.received) == media_of(*engine.fragments[job]))
        assert 0 < count_frames(viewer.received) < FRAMES  # What has come so far is a valid file.
        assert http.get(f"/v1/videos/{job}").json()["status"] == "in_progress"
        for _ in range(2):
            engine.decoded.release()
        content, cut = viewer.end()
    assert (media_of(content), cut) == (media_of(*engine.fragments[job]), False)
    assert count_frames(content) == FRAMES
    assert http.get(f"/v1/videos/{job}").json()["status"] == "completed"
    finished = http.get(f"/v1/videos/{job}/content", params={"stream": 1})
    assert finished.content == http.get(f"/v1/videos/{job}/content").content != content
    assert count_frames(finished.content) == FRAMES
    part = http.get(f"/v1/videos/{job}/content", params={"stream": 1}, headers={"Range": "bytes=4-7"})
    assert (part.status_code, part.content) == (206, b"ftyp")
    http.delete(f"/v1/videos/{job}").raise_for_status()
    worker.retention.sweep()
    assert open_storage(settings.storage).list() == {}


def test_silent_answer_brings_empty_boxes_and_stays_a_valid_file(http, engine, worker, monkeypatch):
    monkeypatch.setattr(watching_module, "_SILENCE_S", 0.05)
    engine.go.clear()
    with watching(http) as (job, viewer):
        wait_for(lambda: viewer.received.count(FREE) >= 3)
        engine.go.set()
        engine.decoded.release(2)
        two = wait_for(lambda: len(engine.fragments[job]) == 2 and media_of(*engine.fragments[job]))
        wait_for(lambda: media_of(viewer.received) == two and viewer.received.endswith(2 * FREE))
        engine.decoded.release(3)
        content, cut = viewer.end()
    kinds = [box.kind for box in list_boxes(content)]
    # A program knows an mp4 by its first box, of which a file has one.
    assert (kinds[:3], kinds.count(b"ftyp")) == ([b"ftyp", b"free", b"free"], 1)
    # https://mimesniff.spec.whatwg.org/#signature-for-mp4
    size = int.from_bytes(content[:4])
    assert size == 28 and any(content[at : at + 3] == b"mp4" for at in (8, *range(16, size, 4)))
    assert (cut, count_frames(content)) == (False, FRAMES)
    assert media_of(content.replace(FREE, b"")) == media_of(*engine.fragments[job])


def test_killed_worker_s_successor_never_continues_with_other_bytes(http, settings, database, engine, caplog):
    caplog.set_level(logging.INFO, "actors")
    quick = serving.change_reliability(settings, lease_s=3.0)
    engine.decoded.release()
    with working(quick, engine), watching(http, seed=3) as (_, viewer):
        wait_for(lambda: viewer.received)  # Who has nothing when a video ends gets its file instead.
        engine.decoded.release(4)
        contents = FragmentSplitter().add(viewer.end()[0])
    job = create(http, num_frames=FRAMES, seed=4).json()["id"]
    queue = WorkQueue(database, reliability=quick.reliability)
    killed = queue.claim("killed")  # It is never heard of again after its second fragment.
    for number, content in enumerate(contents[:2]):
        publish(queue, settings, killed, number, content)
    with watching(http, job) as (_, viewer):
        wait_for(lambda: viewer.received == b"".join(contents[:2]))
        engine.decoded.release(5)
        with working(quick, engine):
            content, cut = viewer.end()
            assert wait_for_end(http, job)["attempts"] == 2
    assert [record.fields["reason"] for record in caplog.records if record.getMessage() == "download cut"] == [
        "the video was decoded again, with other bytes"
    ]
    assert (content, cut) == (b"".join(contents[:2]), True)


def publish(queue, settings, claimed, number, content):
    """Store a fragment as a worker does; return its name."""
    digest, attempt = hashlib.sha256(content).hexdigest(), claimed.attempts
    name = f"{claimed.id}.{attempt}.0-{number:04}.mp4"
    fragment = StoredFragment(name=name, job=claimed.id, attempt=attempt, run=0, number=number, digest=digest)
    queue.announce(claimed, {name: 1})
    open_storage(settings.storage).write(name, content)
    queue.publish_fragments(claimed, [fragment])
    return name


def decode_digests(content):
    """Return the time and digest of every frame."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "-", "-map", "0:v", "-f", "framehash", "-"]
    lines = subprocess.run(command, input=content, capture_output=True, check=True).stdout.splitlines()
    return [line.replace(b" ", b"") for line in lines if line[:1] != b"#"]


def list_frames(stream):
    """Return the digests of the frames so far; the sound of a stream may end a packet earlier than the file's."""
    return [line for line in decode_digests(stream) if line.startswith(b"0,")] if stream else []


def test_video_that_fails_cuts_its_stream(http, engine, worker):
    engine.decoded.release()
    with watching(http) as (job, viewer):
        wait_for(lambda: viewer.received)
        engine.failure = RuntimeError("a bug")
        engine.decoded.release()
        content, cut = viewer.end()
        assert (media_of(content), cut) == (media_of(engine.fragments[job][0]), True)
    answer = http.get(f"/v1/videos/{job}/content", params={"stream": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "video_not_ready")


def test_streams_are_limited_with_events_and_end_with_their_job_and_key(settings, database):
    ann = bearer(make_key(database, "ann"))
    few = serving.change_limits(settings, followers=2)
    with serve(few) as address, open_client(address, headers=ann) as http:
        jobs = [create(http).json()["id"] for _ in range(2)]
        assert http.head(f"/v1/videos/{jobs[0]}/content", params={"stream": 1}).headers["content-type"] == "video/mp4"
        viewers = [Viewer(address, job, ann) for job in jobs]
        for viewer in viewers:
            viewer.start()
            wait_for(lambda viewer=viewer: viewer.answer is not None)
        for path in (f"/v1/videos/{jobs[0]}/content?stream=1", f"/v1/videos/{jobs[0]}/events"):
            refused = http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
        for wrong, status in (({"content": b"x" * 5000}, 413), ({"params": {"stream": "perhaps"}}, 400)):
            assert http.request("GET", f"/v1/videos/{jobs[0]}/content", **wrong).status_code == status
        http.delete(f"/v1/videos/{jobs[0]}").raise_for_status()
        assert viewers[0].end() == (b"", True)
        revoke_key(database, "ann")
        assert viewers[1].end() == (b"", True)


def test_streams_in_which_nothing_happens_cost_little(settings):
    """The target for 200 of them, of as many jobs: 50 MiB, and next to none of a core."""
    many = serving.change_limits(settings, followers=100)
    with serve(many) as address, open_client(address) as http, contextlib.ExitStack() as stack:
        jobs = [create(http).json()["id"] for _ in range(30)]
        url, before, used_s = httpx.URL(address), None, None
        for job in jobs:
            stream = stack.enter_context(socket.create_connection((url.host, url.port), timeout=20))
            request = f"GET /v1/videos/{job}/content?stream=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            stream.sendall(request.encode())
            assert stream.recv(15) == b"HTTP/1.1 200 OK"
            before = before or psutil.Process().memory_info().rss  # From the first one on.
        memory = psutil.Process().memory_info().rss - before
        start, used_s = time.monotonic(), time.process_time()
        time.sleep(1.5)
        share = (time.process_time() - used_s) / (time.monotonic() - start)
    print(f"{memory / len(jobs) / 1e3:.0f} kB a stream, {share:.1%} of a core for {len(jobs)}")
    assert memory < len(jobs) * 250_000
    assert share < 0.25  # On cores that others use, the same work takes several times as long.


def test_fragment_reaches_its_viewer_soon_after_it_is_stored(http, settings, database):
    job, queue, delays_s = create(http).json()["id"], WorkQueue(database), []
    claimed = queue.claim("w")
    with watching(http, job) as (_, viewer):
        for number in range(5):
            publish(queue, settings, claimed, number, bytes([number]) * 50_000)
            start = time.monotonic()
            wait_for(lambda number=number: len(viewer.received) == (number + 1) * 50_000)
            delays_s.append(viewer.times[-1] - start)
        http.post(f"/v1/videos/{job}/cancel").raise_for_status()
        queue.fail(claimed, "invalid", "")
        assert viewer.end()[1]
    print(f"a fragment takes {sorted(delays_s)[2]:.2f} s, at most {max(delays_s):.2f}")
    assert sorted(delays_s)[2] < 0.3
