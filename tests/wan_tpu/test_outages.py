"""An outage is nobody's fault: buckets, the hub and disks that fail are told apart from what they refuse."""

import errno
import io
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from huggingface_hub import hf_api
from huggingface_hub.utils import _http
from PIL import Image

from tests.actors import s3_server
from wan_tpu.adapters import files as adapters
from wan_tpu.checkpoint import Checkpoint, on_disk, weight_file
from wan_tpu.commands import staged
from wan_tpu.errors import CheckpointError, InvalidInput, InvalidRequest, Unavailable
from wan_tpu.families.shared.image_processing import ImageProcessor
from wan_tpu.families.shared.tokenizer import train_tokenizer
from wan_tpu.families.shared.tokenizing import Tokenizer, tokenize
from wan_tpu.identity import identify
from wan_tpu.media.image import load_image
from wan_tpu.media.reading import read_frames
from wan_tpu.runtime.tensor_files import Stored, locate_tensors
from wan_tpu.runtime.weights import read_tensors
from wan_tpu.storage import base
from wan_tpu.storage.addresses import SCHEMES
from wan_tpu.storage.folder import BucketFolder
from wan_tpu.storage.opening import open_storage

UNREADABLE = Path("/proc/self/mem")  # Linux answers EIO, as a failing disk does, when its first bytes are read.
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
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_POST = do_HEAD = do_GET  # noqa: N815 (http.server's names)

        def log_message(self, *args):
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    serving.status, serving.answer = 200, {}
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
    with pytest.raises(Unavailable, match=f"can't list {scheme}bucket/model: the service did not answer"):
        BucketFolder(f"{scheme}bucket/model").files()
    with pytest.raises(Unavailable, match=rf"adapter {scheme}bucket/folder/a\.safetensors: "):
        adapters.find(f"{scheme}bucket/folder/a.safetensors")


def test_cache_that_cannot_be_written_is_unavailable(gcs_object, monkeypatch):
    monkeypatch.setenv("WAN_TPU_CACHE", "/proc/nothing")
    with pytest.raises(Unavailable, match="can't be kept here"):
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
    with pytest.raises(kind, match="owner/name from the Hugging Face hub"):
        Checkpoint("owner/name")
    for path in ("owner/name", "owner/name/a.safetensors"):
        with pytest.raises(InvalidRequest if kind is CheckpointError else Unavailable, match=f"adapter {path}"):
            adapters.find(path)


def test_hub_that_does_not_answer_is_unavailable(closed_port, hub):
    hub(closed_port)
    with pytest.raises(Unavailable):
        Checkpoint("owner/name")
    with pytest.raises(Unavailable):
        adapters.find("owner/name/a.safetensors")


def test_hub_is_not_asked_by_a_process_that_was_told_to_stay_offline(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        Checkpoint("owner/name")
    with pytest.raises(InvalidRequest):
        adapters.find("owner/name/a.safetensors")


def test_weights_on_a_failing_disk_are_unavailable(tmp_path):
    file = tmp_path / "model.safetensors"
    file.symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match="can't be read now"):
        locate_tensors(on_disk(file))
    with pytest.raises(Unavailable, match="can't be read now"):
        read_tensors({"a": Stored(str(file), 0, torch.float32, (4,))})
    with pytest.raises(Unavailable, match=r"adapter .*: .*model\.safetensors"):
        adapters.read(adapters.find(str(tmp_path)), str(tmp_path))


def test_configuration_on_a_failing_disk_is_unavailable(tmp_path):
    (tmp_path / "model_index.json").symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match=r"model_index\.json can't be read now"):
        Checkpoint(tmp_path)


def test_settings_of_a_stage_on_a_failing_disk_are_unavailable(tmp_path):
    with pytest.raises(InvalidInput, match=r"can't be read \(No such file.*run wan-tpu stage1 into"):
        staged.denoise(["--input_dir", str(tmp_path)])
    (tmp_path / staged.CONFIG).symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match="can't be read now"):
        staged.denoise(["--input_dir", str(tmp_path)])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_on_a_failing_disk_is_unavailable(name, tmp_path):
    """The tokenizers package raises a bare Exception for it, as it does for a damaged file."""
    train_tokenizer().save_pretrained(tmp_path)
    tokenize(Tokenizer(tmp_path, 400), "a cat", 16)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match="can't be read now"):
        tokenize(Tokenizer(tmp_path, 400), "a cat", 16)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match="holds no working tokenizer"):
        tokenize(Tokenizer(tmp_path, 400), "a cat", 16)


@pytest.mark.parametrize(
    ("kind", "shape"), [(transformers.CLIPImageProcessor, (3, 8, 8)), (transformers.SiglipImageProcessor, (3, 8, 8))]
)
def test_image_processor_says_what_is_wrong_with_its_file(kind, shape, tmp_path):
    file = tmp_path / "preprocessor_config.json"
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is missing"):
        ImageProcessor(kind, tmp_path, shape).read()
    kind(size={"height": 8, "width": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    ImageProcessor(kind, tmp_path, shape).read()
    with pytest.raises(CheckpointError, match=r"images of \(3, 8, 8\), the image encoder takes \(3, 16, 16\)"):
        ImageProcessor(kind, tmp_path, (3, 16, 16)).read()
    for damaged in ("{", "[]", '{"size": 3.5}'):
        file.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"preprocessor_config\.json holds no working image processor"):
            ImageProcessor(kind, tmp_path, shape).read()
    file.unlink()
    file.symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match=r"preprocessor_config\.json can't be read now"):
        ImageProcessor(kind, tmp_path, shape).read()


def test_content_on_a_failing_disk_does_not_pass_for_unchanged(tmp_path, monkeypatch):
    file = tmp_path / "style.safetensors"
    file.write_bytes(b"weights")
    before = identify(str(file))
    file.unlink()
    file.symlink_to(UNREADABLE)
    for look in (before.check, lambda: identify(str(file)), lambda: identify(str(tmp_path))):
        with pytest.raises(Unavailable, match="can't be read now"):
            look()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = tmp_path / "models--someone--style" / "refs" / "main"
    commit.parent.mkdir(parents=True)
    commit.symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match="can't be read now"):
        identify("someone/style")


def test_weights_that_are_missing_or_cut_off_are_the_callers(tmp_path):
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="is missing"):
        read_tensors({"a": Stored(str(file), 0, torch.float32, (4,))})
    file.write_bytes(bytes(8))
    with pytest.raises(CheckpointError, match="8 bytes of at least 16"):
        read_tensors({"a": Stored(str(file), 0, torch.float32, (4,))})


def test_path_that_no_file_can_have_is_the_callers():
    for source in ("x" * 300, "y/" * 3000):
        with pytest.raises(CheckpointError):
            Checkpoint(source)
        with pytest.raises(InvalidRequest):
            adapters.find(source)


def test_object_that_is_missing_is_the_callers(gcs_object):
    assert weight_file(f"{gcs_object}/model_index.json").size == 2
    with pytest.raises(CheckpointError, match=r"none\.safetensors is missing"):
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


def test_inputs_on_a_failing_disk_are_not_the_requests_fault(tmp_path):
    file = tmp_path / "cat.png"
    file.symlink_to(UNREADABLE)
    with pytest.raises(Unavailable, match=r"image .* can't be read now"):
        load_image(file)
    with pytest.raises(Unavailable, match=r"video .* can't be read now"):
        read_frames(file, 1)
    with pytest.raises(InvalidRequest, match=r"none\.mp4 can't be read"):
        read_frames(tmp_path / "none.mp4", 1)


def test_disk_that_fails_within_a_gif_is_not_the_requests_fault(tmp_path, monkeypatch):
    """The second picture is read after the first has been decoded."""
    film = tmp_path / "film.gif"
    pictures = [Image.effect_noise((64, 64), 100 + i) for i in range(4)]
    pictures[0].save(film, save_all=True, append_images=pictures[1:])
    content = film.read_bytes()

    class Failing(io.BytesIO):
        def read(self, size=-1):
            if self.tell() > len(content) // 2:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(size)

    monkeypatch.setattr("builtins.open", lambda path, *args: Failing(content))
    with pytest.raises(Unavailable, match=r"film\.gif can't be read now"):
        read_frames(film, 4)
    film.write_bytes(content[: len(content) // 2])
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match=r"film\.gif can't be read"):
        read_frames(film, 4)


@pytest.mark.parametrize(("name", "kind"), [("KILL", Unavailable), ("SEGV", InvalidRequest)])
def test_signal_that_ends_ffmpeg_says_whose_fault_it_is(name, kind, tmp_path, monkeypatch):
    """An operator or the kernel kills it; a damaged video makes it crash."""
    program, video = tmp_path / "ffmpeg", tmp_path / "a.mp4"
    program.write_text(f"#!/bin/sh\nulimit -c 0\nkill -{name} $$\n")
    program.chmod(0o755)
    video.write_bytes(b"video")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    with pytest.raises(kind):
        read_frames(video, 1)


def test_result_that_cannot_be_written_blames_no_input(tmp_path):
    with pytest.raises(Exception, match="can't write /proc/nothing/a") as raised:
        open_storage("/proc/nothing").write("a", b"")
    assert not isinstance(raised.value, InvalidInput)
