"""Videos that continue others, and videos of several segments, are watched while they are decoded."""

import errno
import io
import time

import pytest

from actors.api.worker import fragments
from actors.jobs import watching as watching_jobs
from actors.jobs.store import JobStore
from actors.jobs.watching import begin_to_watch
from tests.actors.api import serving
from tests.actors.api.serving import create, open_client, serve, wait_for_end, working
from tests.actors.api.test_watching import count_frames, decode_digests, list_frames, list_stored_fragments, watching
from tests.actors.small_spec import SOUND_SPEC
from tests.waiting import wait_for
from wan_tpu.media import video


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "frames").mkdir()
    return serving.DecodingEngine(tmp_path / "frames")


def list_contents(settings):
    """Return the digests in the names of the fragments in storage: one for each time that a fragment was written."""
    return [name.split(".")[3] for name in list_stored_fragments(settings)]


def download(http, job):
    assert wait_for_end(http, job)["status"] == "completed"
    return http.get(f"/v1/videos/{job}/content").content


def test_finished_parts_are_not_held_and_a_late_client_gets_all_of_them(http, settings, engine, worker):
    job = create(http, num_frames=33, next_prompts=["on"]).json()["id"]
    engine.decoded.release(3 + 1)  # All of a segment, and a fragment of the next.
    wait_for(lambda: len(engine.fragments[job]) == 4)
    assert (worker.held.total, list_stored_fragments(settings)) == (0, [])
    with watching(http, job) as (_, viewer):
        wait_for(lambda: len(list_frames(viewer.received)) == 33 + 16)
        engine.decoded.release(1)
        content, cut = viewer.end()
    assert (cut, list_frames(content)) == (False, list_frames(download(http, job)))
    assert worker.held.total == 0


def test_clients_get_from_its_file_a_segment_that_had_no_room_to_wait(http, engine, worker, monkeypatch):
    is_full = False

    class File(io.FileIO):
        def write(self, content):
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    monkeypatch.setattr(fragments, "open", lambda path, mode, buffering: File(path, "w+b"), raising=False)
    job = create(http, num_frames=65, next_prompts=["on"]).json()["id"]
    engine.decoded.release(2)
    with watching(http, job) as (_, viewer):
        wait_for(lambda: len(list_frames(viewer.received)) == 32)
        is_full = True
        engine.decoded.release(2)
        wait_for(lambda: len(engine.fragments[job]) == 4)
        time.sleep(0.1)
        is_full = False
        engine.decoded.release(1 + 4)
        content, cut = viewer.end()
    assert (cut, list_frames(content)) == (False, list_frames(download(http, job)))


def test_fragments_are_stored_only_while_a_client_watches(http, database, settings, engine, worker, monkeypatch):
    monkeypatch.setattr(fragments, "_WATCHED_S", 0.8)
    monkeypatch.setattr(watching_jobs, "RENEW_S", 0.25)
    job = create(http, num_frames=33, next_prompts=["on"]).json()["id"]
    begin_to_watch(database, job)  # As a client that goes away at once.
    engine.decoded.release(1)
    wait_for(lambda: len(list_stored_fragments(settings)) == 1)
    time.sleep(1.2)
    engine.decoded.release(2)
    wait_for(lambda: JobStore(database).get(job).segments)
    time.sleep(0.3)
    assert len(list_stored_fragments(settings)) == 1
    with watching(http, job) as (_, viewer):
        wait_for(lambda: len(list_frames(viewer.received)) == 33)
        time.sleep(1.2)
        engine.decoded.release(2)
        content, cut = viewer.end()
    assert (cut, list_frames(content)) == (False, list_frames(download(http, job)))


def test_attempt_that_can_not_stream_cuts_early_clients_at_once_and_late_ones_get_the_file(
    http, settings, engine, monkeypatch
):
    job = create(http, num_frames=33, next_prompts=["on"]).json()["id"]
    with watching(http, job) as (_, early), working(settings, engine):
        engine.decoded.release(3)
        wait_for(lambda: len(list_frames(early.received)) == 33)
        wait_for(lambda: len(engine.requests) == 2)
    monkeypatch.setattr(video, "H264", video.H264.replace("bframes=1", "bframes=0"))
    with working(settings, engine):
        engine.decoded.release(1)
        content, cut = early.end()  # Although the segment isn't finished.
        assert (len(list_frames(content)), cut) == (33, True)
        with watching(http, job) as (_, late):
            engine.decoded.release(1)
            received, cut = late.end()
    assert (cut, received) == (False, download(http, job)) and len(list_frames(received)) == 65


def test_a_client_of_slow_storage_gets_the_whole_video(http, settings, engine, worker, monkeypatch):
    monkeypatch.setattr(fragments, "_HEADWAY_S", 0.7)
    write = worker.storage.write

    def write_slowly(name, content):
        time.sleep(0.4)
        write(name, content)

    monkeypatch.setattr(worker.storage, "write", write_slowly)
    job = create(http, num_frames=97, next_prompts=["on"]).json()["id"]
    engine.decoded.release(8)
    wait_for(lambda: len(engine.requests) == 2)
    with watching(http, job) as (_, viewer):
        wait_for(lambda: viewer.received)
        engine.decoded.release(5)
        content, cut = viewer.end()
    assert (cut, list_frames(content)) == (False, list_frames(download(http, job)))
    assert len(list_contents(settings)) == 13


def test_continued_video_brings_its_source_at_once_and_then_the_new_part(settings, engine):
    """With sound, and although a decoder is lost."""
    engine.model, before, after = SOUND_SPEC, 22, 39
    with serve(settings, SOUND_SPEC) as address, working(settings, engine), open_client(address) as http:
        engine.decoded.release(2)
        source = create(http, num_frames=before).json()["id"]
        assert wait_for_end(http, source)["status"] == "completed"
        engine.go.clear()
        engine.losses = 1
        body = {"prompt": "it goes on", "video": {"id": source}, "num_frames": after, "seed": 7}
        job = http.post("/v1/videos/extensions", json=body).raise_for_status().json()["id"]
        with watching(http, job) as (_, viewer):
            wait_for(lambda: len(list_stored_fragments(settings)) == 2 and viewer.received)
            wait_for(lambda: count_frames(viewer.received) == before)
            engine.go.set()
            engine.decoded.release(5)
            content, cut = viewer.end()
        assert not cut
        finished = http.get(f"/v1/videos/{job}/content").content
    assert decode_digests(content) == decode_digests(finished) and count_frames(content) == before + after - 1
    assert b"mp4a" in content and b"mp4a" in finished
