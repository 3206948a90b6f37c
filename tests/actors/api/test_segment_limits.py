"""What a key's segments, prompts and files cost: each counts, and others don't wait for them."""

import contextlib
import dataclasses
import threading
import time

import numpy as np
import pytest
from PIL import Image
from sqlalchemy import select

from actors.jobs.keys import KeyLimits, make_key
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.tables import File
from tests.actors.api.serving import bearer, change_limits, create, data_url, open_client, serve, wait_for_end, working
from tests.waiting import wait_for
from wan_tpu.storage.base import Refused
from wan_tpu.storage.local import LocalStorage


def ask_chain(http, key, segments, **headers):
    return create(http, bearer(key) | headers, next_prompts=["on"] * (segments - 1))


@pytest.fixture
def open_service(settings):
    """Return a service's client, to be called once its keys are made."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(open_client(stack.enter_context(serve(settings))))


def test_segments_take_room_and_too_many_are_refused_for_good(database, open_service):
    key = make_key(database, "ann", KeyLimits(waiting=5))
    http = open_service()
    never = ask_chain(http, key, 6)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "next_prompts")
    assert "retry-after" not in never.headers
    assert ask_chain(http, key, 3).status_code == 200
    full = ask_chain(http, key, 3)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert ask_chain(http, key, 2).status_code == 200


def test_segments_count_towards_the_rate_once_and_polls_do_not_wait_for_them(database, open_service):
    key = make_key(database, "ann", KeyLimits(requests_per_minute=60))  # Ten at once.
    http = open_service()
    invalid = create(http, bearer(key), next_prompts=["on"] * 29, num_frames=2)
    assert invalid.status_code == 400
    chain = ask_chain(http, key, 30, **{"Idempotency-Key": "once"})
    assert chain.status_code == 200
    assert ask_chain(http, key, 30, **{"Idempotency-Key": "once"}).json()["id"] == chain.json()["id"]
    refused = ask_chain(http, key, 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 15 <= int(refused.headers["retry-after"]) <= 21  # Twenty segments more than ten.
    remix = http.post(f"/v1/videos/{chain.json()['id']}/remix", json={"prompt": "otherwise"}, headers=bearer(key))
    assert remix.status_code == 429
    assert http.get(f"/v1/videos/{chain.json()['id']}", headers=bearer(key)).status_code == 200
    assert len(JobStore(database).list().jobs) == 1


def test_key_stores_no_more_than_it_may_and_makes_room_by_deleting(settings, database, engine):
    limited, storage = change_limits(settings, key_bytes=5_000), LocalStorage(settings.storage)
    ann, bob = (bearer(make_key(database, name)) for name in ("ann", "bob"))
    engine.previews = {1: b"preview"}
    with serve(limited) as address, working(limited, engine), open_client(address, headers=ann) as http:
        chain = create(http, next_prompts=["on"], input_reference=make_image(True)).json()["id"]
        assert wait_for_end(http, chain)["status"] == "completed"

        def read_sizes():
            with database.read() as session:
                sizes = dict(session.execute(select(File.name, File.size)).all())
            return sizes == storage.list() and sizes  # A picture is recorded before it is written.

        sizes = wait_for(read_sizes, "the sizes of the input, segments and pictures")
        [used] = http.get("/v1/usage").json()["data"]
        assert used["stored_bytes"] == sum(sizes.values()) > 5_000
        refused = create(http)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "storage_full")
        again = {"x-stainless-retry-count": "1"}  # Of a new request, with or without files.
        assert (
            create(http, again).status_code == create(http, again, input_reference=make_image(True)).status_code == 403
        )
        assert http.post(f"/v1/videos/{chain}/remix", json={"prompt": "otherwise"}).status_code == 403
        assert create(http, bob).status_code == 200
        assert http.delete(f"/v1/videos/{chain}").status_code == 200
        Retention(database, storage, limited.jobs).sweep()
        assert create(http).status_code == 200


def test_storage_that_refuses_for_good_is_not_to_be_tried_again(http, monkeypatch):
    def refuse(self, name, content):
        raise Refused("s3:PutObject isn't allowed on the bucket secret-name")

    monkeypatch.setattr(LocalStorage, "write", refuse)
    refused = create(http, input_reference=make_image(False))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "misconfigured")
    assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers
    assert "secret-name" not in refused.text


def test_operator_sees_and_ends_the_jobs_of_a_model_that_is_no_longer_served(settings, database):
    ann = make_key(database, "ann")
    operator = make_key(database, "operator", KeyLimits(scopes=("operate",)))
    small = dataclasses.replace(settings, queue_limit=4)
    with serve(small) as address, open_client(address) as http:
        old = [create(http, bearer(ann)).json()["id"] for _ in range(2)]
        assert create(http, bearer(ann)).status_code == 429
    with serve(dataclasses.replace(small, model="next")) as address, open_client(address) as http:
        new = [create(http, bearer(ann)).json()["id"] for _ in range(2)]
        waiting = http.get("/v1/videos", params={"status": "queued"}, headers=bearer(operator)).json()["data"]
        assert {video["id"]: video["model"] for video in waiting} == dict.fromkeys(old, settings.model) | dict.fromkeys(
            new, "next"
        )
        for job in old:
            ended = http.post(f"/v1/videos/{job}/cancel", headers=bearer(operator)).json()
            assert (ended["status"], ended["error"]["code"]) == ("failed", "cancelled")
        assert http.delete(f"/v1/videos/{old[0]}", headers=bearer(operator)).status_code == 200
        assert create(http, bearer(operator)).status_code == 403


def test_all_prompts_together_have_a_limit(http):
    long = "x" * 32_000
    assert create(http, prompt=long, negative_prompt=long, guidance_scale=2).status_code == 200
    assert create(http, prompt=long, next_prompts=[long]).status_code == 200
    for fields in ({"prompt": long, "next_prompts": [long, "x"]}, {"negative_prompt": long, "next_prompts": [long]}):
        answer = create(http, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "next_prompts")


def make_image(random):
    shape = (64, 96, 3)
    pixels = np.random.default_rng(1).integers(0, 255, shape) if random else np.zeros(shape)
    return {"image_url": data_url(Image.fromarray(pixels.astype(np.uint8)))}


def test_key_whose_files_are_slow_to_store_delays_no_other(database, open_service, monkeypatch):
    ann, bob = (make_key(database, name) for name in ("ann", "bob"))
    http = open_service()
    write, go, waiting = LocalStorage.write, threading.Event(), []

    def write_slowly(storage, name, content):
        if len(content) > 5000:  # Only Ann's images are as large.
            waiting.append(name)
            go.wait(20)
        write(storage, name, content)

    monkeypatch.setattr(LocalStorage, "write", write_slowly)
    slow = [
        threading.Thread(target=create, args=(http, bearer(ann)), kwargs={"input_reference": make_image(True)})
        for _ in range(10)
    ]
    for thread in slow:
        thread.start()
    try:
        wait_for(lambda: len(waiting) >= 8)
        start = time.monotonic()
        for image in (None, make_image(False)):
            job = create(http, bearer(bob), input_reference=image)
            assert job.status_code == 200
            assert http.get(f"/v1/videos/{job.json()['id']}", headers=bearer(bob)).status_code == 200
        assert time.monotonic() - start < 10  # Ann's images need twice as long.
        assert len(waiting) == 8
    finally:
        go.set()
        for thread in slow:
            thread.join(60)
