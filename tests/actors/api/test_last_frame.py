"""First and last frames in the API: files, data URLs, and the worker's request."""

import io

import numpy as np
import pytest
from PIL import Image

from actors.jobs.store import open_database
from actors.jobs.tables import File
from tests.actors.api import serving
from tests.actors.api.serving import create, data_url, open_client, serve, wait_for_end
from tests.actors.small_spec import SmallSpec

FIRST, LAST = (Image.effect_noise(size, 60).convert("RGB") for size in ((96, 64), (48, 32)))


def png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


class LastFrames(SmallSpec):
    last_images = "optional"


class LastFramesAlone(SmallSpec):
    last_images = "alone"


@pytest.fixture
def http(settings, engine, request):
    spec = engine.model = getattr(request, "param", LastFrames)(serving.SPEC.config)
    with serving.working(settings, engine), serve(settings, spec) as address:
        with open_client(address) as client:
            yield client


def test_both_frames_reach_the_pipeline_in_the_videos_size(http, engine, settings):
    files = {"input_reference": ("a.png", png(FIRST)), "last_frame": ("b.png", png(LAST)), "prompt": (None, "x")}
    job = http.post("/v1/videos", files=files).json()
    assert (job["input_size"], job["last_frame_size"]) == ("96x64", "48x32")
    assert wait_for_end(http, job["id"])["status"] == "completed"
    request = engine.requests[-1]
    assert np.array_equal(np.asarray(request.image), np.asarray(FIRST))
    assert np.array_equal(np.asarray(request.last_image), np.asarray(LAST.resize((96, 64), Image.Resampling.LANCZOS)))
    remixed = http.post(f"/v1/videos/{job['id']}/remix", json={"prompt": "other"}).json()
    assert wait_for_end(http, remixed["id"])["status"] == "completed"
    assert np.array_equal(np.asarray(engine.requests[-1].last_image), np.asarray(request.last_image))
    http.delete(f"/v1/videos/{job['id']}")
    with open_database(settings.database).read() as session:
        assert all(file.delete_at is not None for file in session.query(File) if file.job == job["id"])
    assert http.get("/v1/models").json()["data"][0]["last_frames"] == "optional"


@pytest.mark.parametrize("http", [LastFramesAlone], indirect=True)
def test_last_frame_alone_gives_the_video_its_shape(http, engine):
    job = create(http, last_frame={"image_url": data_url(FIRST.rotate(90, expand=True))}).json()
    assert (job["size"], job["input_size"], job["last_frame_size"]) == ("64x96", None, "64x96")
    assert wait_for_end(http, job["id"])["status"] == "completed"
    assert engine.requests[-1].image is None
    assert np.array_equal(np.asarray(engine.requests[-1].last_image), np.asarray(FIRST.rotate(90, expand=True)))
    assert http.get("/v1/models").json()["data"][0]["last_frames"] == "alone"


def test_what_cant_be_is_refused(http, settings):
    error = create(http, last_frame={"image_url": data_url(LAST)}).json()["error"]
    assert error["param"] == "last_frame"
    both = {"input_reference": {"image_url": data_url(FIRST)}, "last_frame": {"image_url": "https://x.test/b.png"}}
    error = create(http, **both).json()["error"]
    assert error["param"] == "last_frame"
    same = {name: {"image_url": data_url(FIRST)} for name in both}
    assert create(http, num_frames=1, **same).json()["error"]["param"] == "num_frames"
    with serve(settings) as address, open_client(address) as plain:
        error = create(plain, last_frame={"image_url": data_url(LAST)}).json()["error"]
        assert error["param"] == "last_frame"
