"""Where adapters lie: which file a path means, what belongs to it, and when it is another one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch
from safetensors.torch import save

from tests.actors.gcs_server import Emulator
from wan_tpu.adapters.files import read
from wan_tpu.adapters.location import find
from wan_tpu.checkpoint import weight_file
from wan_tpu.errors import InvalidRequest
from wan_tpu.storage.folder import BucketFolder
from wan_tpu.storage.opening import open_storage

COMMITS = "0" * 39 + "1", "0" * 39 + "2"
PAIR = {"x.lora_down.weight": torch.ones(2, 3), "x.lora_up.weight": torch.ones(3, 2)}


def gain_of(path):
    return read(find(path), path)["x"].gain


# ---- buckets


@pytest.fixture
def folder(monkeypatch, tmp_path):
    emulator = Emulator()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.address)
    monkeypatch.setenv("WAN_TPU_CACHE", str(tmp_path / "cache"))
    emulator.make_bucket("adapters")
    yield "gs://adapters/style"
    emulator.close()


def test_version_of_an_adapter_in_a_bucket_has_that_of_its_alpha(folder):
    bucket = open_storage(folder)
    bucket.write("adapter_model.safetensors", save(PAIR))
    for alpha in (4, 8):
        bucket.write("adapter_config.json", json.dumps({"lora_alpha": alpha}).encode())
        adapter = find(folder)
        assert find(f"{folder}/adapter_model.safetensors").version == adapter.version
        assert gain_of(folder) == alpha / 2
    before = adapter.version
    bucket.write("adapter_config.json", b"{}")
    assert find(folder).version != before


def test_names_with_brackets_mean_themselves(folder):
    """Names of objects are never patterns: neither when a file is looked for, nor when it is read."""
    bucket = open_storage(folder)
    for name in ("a [1] (2)*.safetensors", "a 1 (2)*.safetensors", "deeper/b.safetensors", "deeper/x/c.safetensors"):
        bucket.write(name, save(PAIR))
    path = f"{folder}/a [1] (2)*.safetensors"
    assert find(path).weights.address == weight_file(path).address == path
    assert gain_of(path) == 1
    with pytest.raises(InvalidRequest, match=r"a 1 \(2\)\*\.safetensors, a \[1\] \(2\)\*\.safetensors"):
        find(folder)
    assert find(f"{folder}/deeper").weights.address == f"{folder}/deeper/b.safetensors"
    assert list(BucketFolder(folder).files("deeper")) == ["b.safetensors"]


# ---- the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one repository of two commits, which differ in alpha; main is the first until `newest` is 1."""
    contents = [
        {"adapter_model.safetensors": save(PAIR), "adapter_config.json": json.dumps({"lora_alpha": alpha}).encode()}
        for alpha in (4, 8)
    ]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            _, _, revision, file = self.path.lstrip("/").replace("owner/style/", "owner+style/").split("/", 3)
            number = serving.newest if revision == "main" else COMMITS.index(revision)
            content = contents[number].get(file, b"")
            self.send_response(200 if content else 404)
            self.send_header("X-Repo-Commit", COMMITS[number])
            if not content:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("ETag", f'"{number}-{file}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
                serving.newest = 1  # somebody pushes as soon as anything was downloaded

        do_HEAD = do_GET  # noqa: N815 (http.server's name)

        def log_message(self, *args):
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    serving.newest, serving.contents = 0, contents
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{serving.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    huggingface_hub.close_session()  # It was made offline.
    yield serving
    huggingface_hub.close_session()
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_weights_and_alpha_of_the_hub_are_of_one_commit(hub):
    path = "owner/style/adapter_model.safetensors"
    first = find(path)
    assert hub.newest == 1, "pushed between weights and alpha"
    assert read(first, path)["x"].gain == 4 / 2
    assert gain_of(path) == 8 / 2
    assert find(path).version != first.version


def test_file_of_the_hub_without_an_alpha_beside_it_has_none(hub):
    """FastVideo's adapters have the name of peft's, and say in their header how to apply them."""
    for files in hub.contents:
        files.pop("adapter_config.json")
    assert gain_of("owner/style/adapter_model.safetensors") == 1


# ---- the header


@pytest.mark.parametrize(
    ("tensors", "metadata", "gain"),
    [
        (PAIR, {"alpha": "8"}, 8 / 2),
        (PAIR, {"rank": "2"}, 1),
        # What says more than the header's one number is right.
        (PAIR | {"x.alpha": torch.tensor(6.0)}, {"alpha": "8"}, 6 / 2),
        (PAIR, {"alpha": "8", "lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 4})}, 4 / 2),
    ],
)
def test_alpha_in_the_header_is_that_of_models_whose_adapters_have_it_there(tensors, metadata, gain, tmp_path):
    path = str(tmp_path / "turbo.safetensors")
    (tmp_path / "turbo.safetensors").write_bytes(save(tensors, metadata))
    assert read(find(path), path, header_alpha=True)["x"].gain == gain
    if set(metadata) == {"alpha"} and "x.alpha" not in tensors:
        assert gain_of(path) == 1
