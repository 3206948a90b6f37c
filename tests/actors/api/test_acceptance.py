"""Answers are truthful: success means that a job was accepted, and anything else that none was."""

import contextlib
import dataclasses
import sqlite3
import threading
from pathlib import Path

import httpx
import pytest
from sqlalchemy.engine import make_url

from actors.api.core import acceptance
from actors.api.core.acceptance import Acceptance, MaybeAccepted
from actors.api.core.service import Service
from actors.api.http.app import make_app
from actors.jobs.database import Database
from actors.jobs.errors import CommitUncertain, StoreUnavailable
from actors.jobs.retention import Retention
from actors.jobs.store import JobStore
from actors.jobs.tables import File, Job
from actors.jobs.values import Room
from actors.jobs.work import WorkQueue
from tests.actors.api.relay import Relay
from tests.actors.api.serving import MODEL, change_limits, create, listening, open_client, serve
from tests.actors.jobs.conftest import migrated_postgres, postgres_server  # noqa: F401 (fixtures)
from tests.actors.small_spec import SPEC
from tests.conftest import PHOTO
from tests.waiting import wait_for
from wan_tpu.storage.opening import open_storage

AGAIN = {"x-stainless-retry-count": "1"}


@pytest.fixture
def direct(postgres_server, migrated_postgres):  # noqa: F811
    """Return the database, reached directly."""
    opened = Database(postgres_server.new_database(like=migrated_postgres))
    yield opened
    opened.close()


@pytest.fixture
def relay(direct, tmp_path_factory):
    url = make_url(direct._address)
    relay_server = Relay(Path(url.query["host"]), tmp_path_factory.mktemp("r"))
    yield relay_server
    relay_server.close()


@pytest.fixture
def accept(direct, relay, tmp_path):
    """Return a function that accepts a job with an image through the relay."""
    folder = Path(relay._listening.getsockname()).parent
    url = make_url(direct._address).update_query_dict({"host": str(folder)})
    database = Database(url.render_as_string(hide_password=False))
    storage = open_storage(tmp_path / "results")
    store = JobStore(database)
    accepting = Acceptance(store, storage, Retention(database, storage))
    yield lambda job: accepting.accept(job, {job.input_image: b"image"}, room=Room())
    database.close()


def job_with_image():
    return Job(owner="ann", request={}, input_image="input-a.png")


def list_attachments(database):
    with database.read() as session:
        return {file.name: file.job for file in session.query(File)}


def test_a_job_whose_commit_lost_its_answer_is_accepted_with_its_image(accept, relay, direct, tmp_path):
    relay.lose, relay.after = "answer", 1  # After the commit that reserves the image.
    job, new = accept(job_with_image())
    assert new and relay.lose is None
    assert JobStore(direct).get(job.id).input_image == "input-a.png"
    assert list_attachments(direct) == {"input-a.png": job.id}
    assert (tmp_path / "results" / "input-a.png").read_bytes() == b"image"


def test_a_job_whose_commit_never_arrived_leaves_nothing(accept, relay, direct, tmp_path):
    relay.lose, relay.after = "request", 1
    with pytest.raises(CommitUncertain):
        accept(job_with_image())
    assert JobStore(direct).list().jobs == () and list_attachments(direct) == {}
    assert not (tmp_path / "results" / "input-a.png").exists()


def test_nothing_is_undone_while_nobody_says_whether_a_job_was_accepted(accept, relay, direct, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "_LOOK_S", 0.3)
    relay.lose, relay.after = "answer", 1

    def away():
        wait_for(lambda: relay.lose is None)
        relay.open = False

    leaving = threading.Thread(target=away)
    relay.open = True
    find = JobStore.find_committed
    monkeypatch.setattr(JobStore, "find_committed", lambda self, job: leaving.join() or find(self, job))
    leaving.start()
    job = job_with_image()
    with pytest.raises(MaybeAccepted, match="Idempotency-Key") as uncertain:
        accept(job)
    assert uncertain.value.status == 503 and "Retry-After" in uncertain.value.headers
    assert list_attachments(direct) == {"input-a.png": job.id} and JobStore(direct).get(job.id)
    assert (tmp_path / "results" / "input-a.png").exists()


@contextlib.contextmanager
def lock_database(settings):
    """Keep others from writing to the database until the block ends."""
    with contextlib.closing(sqlite3.connect(settings.database, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def test_a_database_that_is_locked_for_long_costs_an_upload_only_time(settings):
    quick = change_limits(settings, reader_s=2.0)
    answers = []
    with serve(quick) as address, open_client(address) as http:

        def send():
            files = {"input_reference": PHOTO.read_bytes()}
            answers.append(http.post("/v1/videos", data={"prompt": "x"}, files=files))

        with lock_database(settings):
            sending = threading.Thread(target=send)
            sending.start()
            sending.join(2.5)
        sending.join()
        assert [answer.status_code for answer in answers] == [200]
        assert len(http.get("/v1/videos").json()["data"]) == 1


def test_an_accepted_job_is_answered_from_what_is_at_hand(http, monkeypatch):
    look = JobStore.look

    def away(self, *_):
        raise StoreUnavailable("the database is away")

    monkeypatch.setattr(JobStore, "look", away)
    response = create(http)
    monkeypatch.setattr(JobStore, "look", look)
    assert response.status_code == 200
    assert http.get(f"/v1/videos/{response.json()['id']}").json()["status"] == "queued"


@contextlib.contextmanager
def open_service(settings):
    """Serve the application, and yield a client."""
    service = Service(settings, SPEC)
    with listening(make_app(service)) as address, open_client(address) as http:
        yield service, http


class Waiting:
    """A client that waits for a short video until it disconnects."""

    def __init__(self, http, service, headers=None, **fields):
        self._address, self._service, self.answer = str(http.base_url), service, None
        self._client = httpx.Client(base_url=self._address, timeout=60)
        self._body, self._headers = {"prompt": "x", **fields}, headers or {}
        threading.Thread(target=self._wait, daemon=True).start()
        self.job = wait_for(lambda: self._newest(http))

    def _newest(self, http):
        jobs = http.get("/v1/videos").json()["data"]
        return jobs and jobs[0]["prompt"] == self._body["prompt"] and jobs[0]["id"]

    def _wait(self):
        with contextlib.suppress(httpx.HTTPError, RuntimeError, OSError):
            with self._client.stream("POST", "/v1/videos/sync", json=self._body, headers=self._headers) as answer:
                self.answer = answer.status_code

    def hang_up(self, followers=0):
        """Close the connection and wait until the service notices."""
        for connection in self._client._transport._pool.connections:
            stream = connection._connection._network_stream
            stream.get_extra_info("socket").shutdown(2)
        wait_for(lambda: self._service.following.count_followers(self.job) == followers)


def status(http, job):
    return http.get(f"/v1/videos/{job}").json()


def test_whoever_may_follow_nothing_more_has_nothing_accepted(settings):
    few = change_limits(settings, followers=1)
    with open_service(few) as (service, http):
        job = create(http).json()["id"]
        with http.stream("GET", f"/v1/videos/{job}/events"):
            wait_for(lambda: service.following.count_followers(job))
            refused = httpx.post(f"{http.base_url}/v1/videos/sync", json={"prompt": "y"}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
        assert [video["id"] for video in http.get("/v1/videos").json()["data"]] == [job]


def test_a_job_under_an_idempotency_key_outlives_its_client(settings):
    with open_service(settings) as (service, http):
        waiting = Waiting(http, service, {"Idempotency-Key": "k"})
        wait_for(lambda: service.following.count_followers(waiting.job) == 1)
        waiting.hang_up()
        assert status(http, waiting.job)["status"] == "queued"
        again = create(http, {"Idempotency-Key": "k"}, prompt="x")
        assert again.json()["id"] == waiting.job


@pytest.mark.parametrize(("path", "elsewhere"), [("content?stream=1", True), ("events", False)])
def test_a_job_outlives_its_client_where_a_stream_of_any_ingress_waits_for_it(settings, path, elsewhere):
    with open_service(settings) as (service, http), serve(settings) as other, contextlib.ExitStack() as streams:
        waiting = Waiting(http, service)
        wait_for(lambda: service.following.count_followers(waiting.job) == 1)
        client = streams.enter_context(open_client(other)) if elsewhere else http
        assert streams.enter_context(client.stream("GET", f"/v1/videos/{waiting.job}/{path}")).status_code == 200
        waiting.hang_up(followers=int(path == "events" and not elsewhere))
        assert status(http, waiting.job)["status"] == "queued"


def test_a_request_that_was_refused_and_is_repeated_gets_a_job_of_its_own(settings, database):
    """Two videos of one prompt were requested, so the second request mustn't get the first one's job."""
    with serve(dataclasses.replace(settings, queue_limit=1)) as address, open_client(address) as http:
        first = create(http).json()["id"]
        assert create(http).status_code == 429
        assert WorkQueue(database).claim("w").id == first  # This makes room in the queue.
        second = create(http, AGAIN)
        assert second.status_code == 200 and second.json()["id"] != first


def test_a_remix_that_is_repeated_is_one_job(http):
    source = create(http, seed=3).json()["id"]
    path, body = f"/v1/videos/{source}/remix", {"prompt": "a dog"}
    first = http.post(path, json=body).json()["id"]
    assert http.post(path, json=body, headers=AGAIN).json()["id"] == first
    for others in ({}, {"x-stainless-retry-count": "0"}):
        assert http.post(path, json=body, headers=others).json()["id"] != first


def test_a_video_of_another_model_is_not_remixed(http, database):
    job = create(http).json()["id"]
    store = JobStore(database)
    accepted = store.get(job)
    assert accepted.model == MODEL
    for model in ("model-before", None):  # None: accepted by an earlier version
        request = accepted.request | {"model": "model-before"}
        old, _ = store.submit(Job(owner="", model=model, request=request))
        refused = http.post(f"/v1/videos/{old.id}/remix", json={"prompt": "y"}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_found")
        assert "model-before" in refused.json()["error"]["message"] and MODEL in refused.json()["error"]["message"]
    assert http.post(f"/v1/videos/{job}/remix", json={"prompt": "y"}, timeout=60).status_code == 200
