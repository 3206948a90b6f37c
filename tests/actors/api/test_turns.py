"""Owners take turns by the segment; what is computed is stored before anything that can fail, and never made again."""

import dataclasses
import errno
from pathlib import Path

import imageio_ffmpeg
import pytest

from actors.api.worker import making
from actors.jobs.keys import make_key
from actors.jobs.store import JobStore
from tests.actors.api.serving import bearer, change_reliability, create, open_client, serve, wait_for_end, working
from tests.actors.api.test_extensions import content
from tests.waiting import wait_for


def test_segments_of_two_owners_alternate_on_one_place(settings, engine, database):
    keys = [bearer(make_key(database, name)) for name in ("ann", "bob")]
    with serve(settings) as address, open_client(address) as http:
        jobs = [create(http, key, prompt="0", next_prompts=["1"]).json()["id"] for key in keys]
        with working(dataclasses.replace(settings, concurrency=1), engine):
            for job, key in zip(jobs, keys, strict=True):
                wait_for(lambda job=job, key=key: http.get(f"/v1/videos/{job}", headers=key).json()["progress"] == 100)
    assert [request.prompt for request in engine.requests] == ["0", "0", "1", "1"]
    assert [JobStore(database).get(job).attempts for job in jobs] == [2, 2]


class Failing:
    """An ffmpeg that fails at commands that match a pattern, as on a machine without memory, until it is mended."""

    SCRIPT = """#!/bin/sh
for argument in "$@"; do case "$argument" in {pattern}) met=1;; esac; done
if [ "$met" ] && [ ! -e {folder}/mended ]; then echo >> {folder}/failed; {failure}; fi
exec {ffmpeg} "$@"
"""

    def __init__(self, monkeypatch, folder, pattern, failure):
        folder.mkdir()
        self._folder = folder
        (folder / "failed").touch()
        program, ffmpeg = folder / "ffmpeg", imageio_ffmpeg.get_ffmpeg_exe()
        program.write_text(self.SCRIPT.format(pattern=pattern, folder=folder, ffmpeg=ffmpeg, failure=failure))
        program.chmod(0o755)
        monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(program))

    @property
    def count(self):
        return len((self._folder / "failed").read_text())

    def mend(self):
        (self._folder / "mended").touch()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(making, "_PICTURE_PAUSES_S", (0.05,))


SHEET, LAST = r"*select=\'*+eq*", r"*select=\'eq\(n,8\)\'*"
NO_THREAD = "echo '[h264 @ 0x5] pthread_create() failed: Resource temporarily unavailable' >&2; exit 245"


def test_a_video_is_complete_without_thumbnails_that_can_not_be_made(settings, engine, monkeypatch, quick, tmp_path):
    failing = Failing(monkeypatch, tmp_path / "bin", SHEET, "kill -9 $$")
    with serve(settings) as address, open_client(address) as http:
        job = create(http).json()["id"]
        with working(settings, engine):
            video = wait_for_end(http, job)
        assert (video["status"], video["attempts"], len(engine.requests)) == ("completed", 1, 1)
        assert failing.count > 0 and content(http, video)
        assert http.get(f"/v1/videos/{job}/content", params={"variant": "thumbnail"}).status_code == 404


def test_a_shortage_between_segments_costs_none(settings, engine, database, monkeypatch, quick, tmp_path):
    failing = Failing(monkeypatch, tmp_path / "bin", LAST, NO_THREAD)
    limited, store = change_reliability(settings, pipeline_pause_s=0.1), JobStore(database)
    with serve(settings) as address, open_client(address) as http, working(limited, engine):
        job = create(http, next_prompts=["on"]).json()["id"]
        wait_for(lambda: store.get(job).attempts >= 3)
        assert failing.count >= 4 and len(engine.requests) == 1
        failing.mend()
        assert wait_for_end(http, job)["status"] == "completed" and len(engine.requests) == 2


def test_a_temporary_disk_that_is_full_costs_no_segment(settings, engine, database, monkeypatch, quick):
    """A chain waits for room, since its next segment needs a last frame."""
    is_full, open_file = True, Path.open

    def open_if_there_is_room(path, mode="r", *args, **options):
        if is_full and "w" in mode and ".wan-tpu.temporary." in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_if_there_is_room)
    limited, store = change_reliability(settings, pipeline_pause_s=0.1), JobStore(database)
    with serve(settings) as address, open_client(address) as http, working(limited, engine):
        chain = create(http, next_prompts=["on"]).json()["id"]
        wait_for(lambda: store.get(chain).attempts >= 3)
        assert len(store.get(chain).segments) == 1 and len(engine.requests) == 1
        is_full = False
        assert wait_for_end(http, chain)["status"] == "completed" and len(engine.requests) == 2
