"""Previews of unfinished videos: in the video object, in its events, as content, and gone when the video is there."""

import io
import json

from PIL import Image
from sqlalchemy import select

from actors.jobs.tables import File
from tests.actors.api.serving import create, open_client, serve, wait_for_end, working
from tests.waiting import wait_for


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


def test_preview_that_cannot_be_stored_fails_no_video(settings, engine):
    engine.previews = {1: "no bytes", 2: jpeg("red")}
    with working(settings, engine), serve(settings, engine.model) as address, open_client(address) as http:
        assert wait_for_end(http, create(http, num_inference_steps=4).json()["id"])["status"] == "completed"
