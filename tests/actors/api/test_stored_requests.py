"""Jobs stored by earlier versions are shown, planned as before, and remixed."""

import dataclasses
import io
import json

import pytest
from PIL import Image
from sqlalchemy import text

from actors.api.catalogue import Catalogue
from actors.api.core.acceptance import Acceptance
from actors.errors import RequestFailed
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.stored_request import VERSION, count_frames, set_frames
from actors.jobs.tables import Job
from actors.jobs.values import Room
from tests.actors.api import serving
from tests.actors.api.serving import create, open_client, wait_for_end
from wan_tpu.families import published_spec
from wan_tpu.requested_adapter import RequestedAdapter
from wan_tpu.storage.opening import open_storage

LIGHTNING = (
    RequestedAdapter("/adapters/high.safetensors", 1.0, "high"),
    RequestedAdapter("/adapters/low.safetensors", 1.0, "low"),
)
FRAME = Image.new("RGB", (96, 64), "red")
# What commit f6b12db stored, letter for letter: of an image with a preset.


OF_AN_IMAGE = (
    '{"prompt": "the cat looks into the camera", "negative_prompt": "", "image": "640x480", "last_image": null, '
    '"video": null, "strength": null, "height": 720, "width": 1280, "frames": 81, "fps": 16, "steps": 4, '
    '"guidance_scale": 1.0, "guidance_scale_2": 1.0, "shift": 5.0, "seed": 7, "solver": "euler", '
    '"loras": [{"name": "lightning", "scale": 1.0}], "sigmas": [1.0, 0.9375, 0.8333333333333334, 0.625], '
    '"switch_step": 2, "cache": null, "preset": "lightning", "model": "wan2.2-i2v-a14b", "seconds": null, '
    '"skipped": []}'
)
# Of a version before that one, which knew fewer fields.
EARLIER = (
    '{"prompt": "a cat", "negative_prompt": "", "image": null, "height": 480, "width": 832, "frames": 17, "fps": 16, '
    '"steps": 4, "guidance_scale": 4.0, "guidance_scale_2": 3.0, "shift": 12.0, "seed": 3, "solver": "unipc", '
    '"model": "wan2.2-t2v-a14b", "seconds": null}'
)


@pytest.fixture
def submit(settings, database):
    """Returns a function that stores a job as it stands there; its images are all the same."""

    def submit_stored(stored):
        request, png = json.loads(stored), io.BytesIO()
        FRAME.save(png, "PNG")
        names = [name if request.get(name) else None for name in ("image", "last_image")]
        job = Job(owner="", model=request["model"], request={}, input_image=names[0], input_last_image=names[1])
        store, storage = JobStore(database), open_storage(settings.storage)
        acceptance = Acceptance(store, storage, Retention(database, storage, settings.jobs))
        acceptance.accept(job, dict.fromkeys(job.inputs, png.getvalue()), room=Room())
        with database.write() as session:
            session.execute(text("UPDATE jobs SET request = :stored WHERE id = :id"), {"stored": stored, "id": job.id})
        return job.id

    return submit_stored


@pytest.mark.parametrize("stored", [OF_AN_IMAGE, EARLIER])
def test_jobs_of_earlier_versions_are_shown_and_planned_as_they_were_stored(stored, submit, settings, engine):
    """This holds even if a model's published settings have changed since."""
    expected = json.loads(stored)
    spec = engine.model = published_spec(expected["model"])
    engine.failure = RequestFailed("it is planned, and not made here", "invalid")
    settings = dataclasses.replace(settings, model=spec.name, catalogue=Catalogue({"lightning": LIGHTNING}))
    job = submit(stored)
    sizes = expected.pop("image"), expected.pop("last_image", None)
    with serving.serve(settings, spec) as address, open_client(address) as http:
        video = http.get(f"/v1/videos/{job}").json()
        assert (video["prompt"], video["seed"]) == (expected["prompt"], expected["seed"])
        assert (video["num_frames"], video["num_inference_steps"]) == (expected["frames"], expected["steps"])
        assert (video["sigmas"], video["loras"]) == (expected.get("sigmas"), expected.get("loras", []))
        assert (video["input_size"], video["last_frame_size"]) == sizes
        with serving.working(settings, engine):
            wait_for_end(http, job)
            again = http.post(f"/v1/videos/{job}/remix", json={"prompt": "another"}).json()
            assert (again["input_size"], again["last_frame_size"]) == sizes
            wait_for_end(http, again["id"])
    first, remixed = engine.requests
    planned = first.to_json()
    assert planned["sigmas"] == (tuple(expected["sigmas"]) if expected.get("sigmas") else None)
    same = expected.keys() - {"model", "seconds", "skipped", "loras", "sigmas"}
    assert {name: planned[name] for name in same} == {name: expected[name] for name in same}
    assert first.loras == (LIGHTNING if expected.get("loras") else ())
    assert [image is None for image in (first.image, first.last_image)] == [size is None for size in sizes]
    assert remixed.to_json() == planned | {"prompt": "another"}


def test_a_job_is_stored_with_the_version_of_its_form(http, database):
    job = create(http, seed=3).json()["id"]
    with database.read() as session:
        [stored] = session.execute(text("SELECT request FROM jobs WHERE id = :id"), {"id": job}).scalars()
    stored = json.loads(stored)
    assert (stored["version"], stored["seed"], stored["model"]) == (VERSION, 3, serving.MODEL)
    assert "image" not in stored
    assert "version" not in JobStore(database).get(job).request


def test_a_length_that_is_known_later_changes_what_an_extension_adds():
    request = {"frames": 473, "added_frames": 448, "source_frames": 121, "continue_by": "motion", "max_seconds": 20}
    made = set_frames(request, 97)
    assert (made["frames"], made["added_frames"]) == (97, 72)
    assert (count_frames(request), count_frames(made)) == (121 + 448, 121 + 72)
    assert set_frames({"frames": 473}, 97) == {"frames": 97}
