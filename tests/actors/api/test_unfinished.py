"""Previews of unfinished videos: in the video object, in its events, as content, and gone when the video is there."""

import io
import json
import threading

from PIL import Image
from sqlalchemy import select

from actors.jobs.retention import Retention
from actors.jobs.tables import File
from tests.actors.api.browsing import ask, sync_api
from tests.actors.api.serving import create, open_client, serve, wait_for_end, working
from tests.waiting import SECONDS, wait_for
from wan_tpu.storage.local import LocalStorage
from wan_tpu.storage.opening import open_storage


def jpeg(colour):
    file = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(file, "JPEG")
    return file.getvalue()


def test_preview_is_shown_until_the_video_is_there(settings, engine, database):
    engine.go.clear()
    engine.previews = {1: jpeg("red"), 3: jpeg("blue")}
    with working(settings, engine), serve(settings, engine.model) as address, open_client(address) as http:
        job = create(http, num_inference_steps=4).json()
        assert job["preview_step"] is None
        path = f"/v1/videos/{job['id']}"
        video = wait_for(lambda: (seen := http.get(path).json())["preview_step"] and seen, "a preview")
        assert (video["status"], video["preview_step"]) == ("in_progress", 1)
        answer = http.get(f"{path}/content?variant=preview")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
        assert answer.content == engine.previews[1]
        assert answer.headers["cache-control"] == "no-cache"  # The next one is at the same address.
        assert http.get(f"{path}/content").status_code == 404
        with http.stream("GET", f"{path}/events") as events:
            line = next(line for line in events.iter_lines() if line.startswith("data:"))
            assert json.loads(line.removeprefix("data:"))["preview_step"] == 1
        with database.read() as session:
            [name] = session.scalars(select(File.name).where(File.name.contains(".step-1."), File.delete_at.is_(None)))

        engine.go.set()
        video = wait_for_end(http, job["id"])
        assert (video["status"], video["preview_step"]) == ("completed", None)
        gone = http.get(f"{path}/content?variant=preview")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "variant_not_found")
        assert http.get(f"{path}/content").status_code == 200
        with database.read() as session:
            kept = session.scalars(select(File.name).where(File.name.contains(".step-"), File.delete_at.is_(None)))
            assert not kept.all() and session.get(File, name).delete_at is not None


def test_a_preview_that_is_written_late_is_deleted_too(settings, engine, database, monkeypatch):
    begins, goes_on, is_written = (threading.Event() for _ in range(3))
    write = LocalStorage.write

    def write_late(storage, name, content):
        if ".step-" in name:
            begins.set()
            goes_on.wait(SECONDS)
        write(storage, name, content)
        if ".step-" in name:
            is_written.set()

    monkeypatch.setattr(LocalStorage, "write", write_late)
    engine.previews = {1: jpeg("red")}
    engine.go.clear()
    with working(settings, engine), serve(settings, engine.model) as address, open_client(address) as http:
        job = create(http, num_inference_steps=4).json()["id"]
        assert begins.wait(SECONDS)
        engine.go.set()
        assert wait_for_end(http, job)["status"] == "completed"
        assert http.delete(f"/v1/videos/{job}").status_code == 200
        storage = open_storage(settings.storage)
        Retention(database, storage, settings.jobs).sweep()
        goes_on.set()
        assert is_written.wait(SECONDS)
        left = {name for name in storage.list() if ".step-" in name}
        with database.read() as session:
            assert left and left <= set(session.scalars(select(File.name)))  # They are deleted when they are due.


def test_preview_that_cannot_be_stored_fails_no_video(settings, engine):
    engine.previews = {1: "no bytes", 2: jpeg("red")}
    with working(settings, engine), serve(settings, engine.model) as address, open_client(address) as http:
        assert wait_for_end(http, create(http, num_inference_steps=4).json()["id"])["status"] == "completed"


def test_page_shows_the_preview_while_the_video_is_made(page, worker, engine):
    engine.go.clear()
    engine.previews = {1: jpeg("red")}
    card = ask(page, "A cat looks up", size="96 x 64", Frames=9, Steps=4)
    picture = card.locator("img.preview")
    picture.wait_for()
    assert picture.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [64, 48]
    engine.go.set()
    card.get_by_role("button", name="play:").wait_for()
    sync_api.expect(picture).to_have_count(0)
