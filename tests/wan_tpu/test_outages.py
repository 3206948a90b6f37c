"""An outage is nobody's fault: buckets and the hub that fail are told apart from what they refuse."""

import errno
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from huggingface_hub import hf_api
from huggingface_hub.utils import _http

from tests.actors import s3_server
from wan_tpu.adapters import location
from wan_tpu.checkpoint import Checkpoint, weight_file
from wan_tpu.errors import CheckpointError, InvalidRequest, Unavailable
from wan_tpu.sources.hub import explain_hub_errors
from wan_tpu.storage import base
from wan_tpu.storage.addresses import SCHEMES
from wan_tpu.storage.folder import BucketFolder
from wan_tpu.storage.opening import open_storage

REFUSED, BUSY = (401, 403, 404), (408, 429, 500, 503)
STATUSES = [*((status, CheckpointError) for status in REFUSED), *((status, Unavailable) for status in BUSY)]


@pytest.fixture
def closed_port():
    """An address where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def server():
    """A server that answers everything with one HTTP status and one JSON value; it knows its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            content = json.dumps(serving.answer).encode()
            self.send_response(serving.status)
            self.send_header("Content-Type", "application/json")
            for name, value in serving.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_POST = do_HEAD = do_GET  # noqa: N815 (http.server's names)

        def log_message(self, *args):
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    serving.status, serving.answer, serving.headers = 200, {}, {}
    serving.address = f"http://127.0.0.1:{serving.server_port}"
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield serving
    serving.shutdown()
    thread.join()
    serving.server_close()


@pytest.fixture(autouse=True)
def short_outages(monkeypatch, tmp_path):
    monkeypatch.setattr(base, "OUTAGE_S", 0.1)
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Returns a function that sends the hub's client to an address; the client doesn't sleep before it tries again."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    huggingface_hub.close_session()  # It was made offline.

    def use(address):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(hf_api.api, "endpoint", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    yield use
    huggingface_hub.close_session()


def send_to(address, monkeypatch):
    """Have the clients of both services ask at an address."""
    for name, value in (s3_server.ACCOUNT | {"STORAGE_EMULATOR_HOST": address, "AWS_ENDPOINT_URL": address}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("status", "kind"), STATUSES)
def test_status_of_a_bucket_says_whose_fault_it_is(status, kind, scheme, server, monkeypatch):
    server.status = status
    send_to(server.address, monkeypatch)
    with pytest.raises(kind, match=f"{scheme}bucket/model"):
        Checkpoint(f"{scheme}bucket/model")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bucket_that_does_not_answer_is_unavailable(scheme, closed_port, monkeypatch):
    send_to(closed_port, monkeypatch)
    with pytest.raises(Unavailable, match=f"{scheme}bucket/model"):
        BucketFolder(f"{scheme}bucket/model").files()
    with pytest.raises(Unavailable, match=rf"adapter {scheme}bucket/folder/a\.safetensors: "):
        location.find(f"{scheme}bucket/folder/a.safetensors")


def test_cache_that_cannot_be_written_is_unavailable(gcs_object, monkeypatch):
    monkeypatch.setenv("WAN_TPU_CACHE", "/proc/nothing")
    with pytest.raises(Unavailable):
        BucketFolder(gcs_object).fetch(["*.json"])


@pytest.fixture
def key_file(tmp_path, monkeypatch):
    """Returns a function that has Google's client log in at an address, with a service account's key."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    account = {"type": "service_account", "project_id": "p", "client_email": "a@b", "private_key_id": "1"}
    account["private_key"] = key.private_bytes(*pem).decode()

    def use(address):
        file = tmp_path / "key.json"
        file.write_text(json.dumps(account | {"token_uri": f"{address}/token"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))

    return use


def test_authorization_server_that_does_not_answer_is_unavailable(closed_port, key_file):
    key_file(closed_port)
    with pytest.raises(Unavailable):
        BucketFolder("gs://bucket/model").files()


def test_key_that_the_authorization_server_refuses_is_the_callers(server, key_file):
    server.status, server.answer = 400, {"error": "invalid_grant"}
    key_file(server.address)
    with pytest.raises(CheckpointError, match="invalid_grant"):
        BucketFolder("gs://bucket/model").files()


def test_missing_key_file_is_the_callers(tmp_path, monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(CheckpointError, match=r"none\.json"):
        BucketFolder("gs://bucket/model").files()


@pytest.mark.parametrize(("status", "kind"), STATUSES)
def test_status_of_the_hub_says_whose_fault_it_is(status, kind, server, hub):
    server.status = status
    hub(server.address)
    with pytest.raises(kind, match="owner/name"):
        Checkpoint("owner/name")
    for path in ("owner/name", "owner/name/a.safetensors"):
        with pytest.raises(InvalidRequest if kind is CheckpointError else Unavailable, match=f"adapter {path}"):
            location.find(path)


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [(403, "GatedRepo", r"accept its conditions at \S+/owner/name"), (401, "RepoNotFound", "check the id; if")],
)
def test_refusal_of_the_hub_names_the_remedy_for_its_cause(status, code, remedy, server, hub):
    server.status, server.headers = status, {"X-Error-Code": code}
    hub(server.address)
    with pytest.raises(CheckpointError, match=remedy):
        Checkpoint("owner/name")


def test_full_disk_below_the_hub_s_cache_is_not_blamed_on_the_network():
    with pytest.raises(Unavailable, match="HF_HOME") as full, explain_hub_errors("owner/name"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "network" not in str(full.value)


def test_hub_that_does_not_answer_is_unavailable(closed_port, hub):
    hub(closed_port)
    with pytest.raises(Unavailable):
        Checkpoint("owner/name")
    with pytest.raises(Unavailable):
        location.find("owner/name/a.safetensors")


def test_hub_is_not_asked_by_a_process_that_was_told_to_stay_offline(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        Checkpoint("owner/name")
    with pytest.raises(InvalidRequest):
        location.find("owner/name/a.safetensors")


def test_path_that_no_file_can_have_is_the_callers():
    for source in ("x" * 300, "y/" * 3000):
        with pytest.raises(CheckpointError):
            Checkpoint(source)
        with pytest.raises(InvalidRequest):
            location.find(source)


def test_object_that_is_missing_is_the_callers(gcs_object):
    assert weight_file(f"{gcs_object}/model_index.json").size == 2
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        weight_file(f"{gcs_object}/none.safetensors")


@pytest.fixture
def gcs_object(monkeypatch):
    """The address of a bucket's folder with one JSON file."""
    from tests.actors.gcs_server import Emulator

    emulator = Emulator()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.address)
    emulator.make_bucket("videos")
    open_storage("gs://videos/model").write("model_index.json", b"{}")
    yield "gs://videos/model"
    emulator.close()
