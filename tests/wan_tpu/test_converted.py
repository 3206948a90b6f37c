"""Checkpoints as `wan-tpu weights convert` writes them: the same weights to the bit, read in pieces, checked."""

import hashlib
import json
import os
import socket
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.cli import main
from tests.children import start_module
from tests.conftest import with_devices
from tests.waiting import SECONDS
from wan_tpu import load_pipeline
from wan_tpu.adapters.files import read
from wan_tpu.adapters.location import find
from wan_tpu.checkpoint import Checkpoint
from wan_tpu.errors import CheckpointError
from wan_tpu.families.model import open_model
from wan_tpu.progress import Silent
from wan_tpu.runtime import converted
from wan_tpu.runtime.components import load_component, open_component
from wan_tpu.runtime.converted import FILE, FORMAT_VERSION, MANIFEST
from wan_tpu.runtime.converting import convert
from wan_tpu.runtime.mesh import make_mesh
from wan_tpu.storage.opening import open_storage

KINDS = ["wan2.2-i2v-a14b", "wan2.2-ti2v-5b", "wan2.1-i2v-14b-480p", "cogvideox1.5-5b-i2v", "hunyuanvideo1.5-480p-i2v"]
KINDS += ["ltx-2.3-distilled", "minimax-h3"]
# Of the others than the first, `make thorough` compares the values, and the order of their numbers is compared below.
# By kind, of names, shapes and the order of numbers. Whoever changes one of these gives `FORMAT_VERSION` another
# number: what was converted before would be read wrongly.
ORDERS = {
    2: {
        "wan2.2-i2v-a14b": "be4557190d628f9d",
        "wan2.2-ti2v-5b": "0b01a2a316d5fe27",
        "wan2.1-i2v-14b-480p": "dd898b94e3e1f760",
        "cogvideox1.5-5b-i2v": "9b6c444ded4255f0",
        "hunyuanvideo1.5-480p-i2v": "90b1a50ae0129c6c",
        "ltx-2.3-distilled": "b8f4102e88a89b51",
        "minimax-h3": "1140553b76ca2cc4",
    }
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 1, 1), heads=4)


def converted_to(checkpoint, kind, folder):
    """A small checkpoint, converted; even its small weights are cut."""
    source = Checkpoint(checkpoint(kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converted, "SMALL_BYTES", 2**10)
        destination = open_storage(folder, private=False)
        assert convert(source, open_model(source).components, "bfloat16", destination, Silent()) == []
    return folder


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    return converted_to(checkpoint, KINDS[0], tmp_path_factory.mktemp("converted"))


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS[1:])])
def test_every_weight_is_that_of_the_checkpoint(kind, checkpoint, tmp_path, mesh):
    copy = Checkpoint(converted_to(checkpoint, kind, tmp_path))
    assert not [file for file in tmp_path.rglob("*.safetensors") if file.name != FILE]
    for component in open_model(copy).components.values():
        ours = load_component(copy, component, "bfloat16", mesh).params
        expected = load_component(Checkpoint(checkpoint(kind)), component, "bfloat16", mesh).params
        assert ours.keys() == expected.keys()
        for name, array in ours.items():
            assert array.dtype == expected[name].dtype
            assert np.array_equal(np.asarray(array), np.asarray(expected[name])), name


@pytest.mark.long
def test_each_process_reads_its_own_shards_alone(folder, checkpoint, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    files = [tmp_path / f"{rank}.log" for rank in range(2)]
    both = [
        start_module(
            "tests.wan_tpu.converted_worker",
            *(rank, coordinator, folder, checkpoint(KINDS[0])),
            environment=with_devices(4),
            output=file,
        )
        for rank, file in enumerate(files)
    ]
    for process, file in zip(both, files, strict=True):
        process.join(SECONDS)
        assert process.exitcode == 0, file.read_text()
        read, own = map(int, file.read_text().splitlines()[-1].split())
        assert own <= read <= 1.1 * own


def order(kind, checkpoint, mesh):
    """What decides how a converted file is read, as one number."""
    source, digest = Checkpoint(checkpoint(kind)), hashlib.sha256()
    for name, component in sorted(open_model(source).components.items()):
        opened = open_component(source, component, "bfloat16", mesh)
        for weight_name, weight in sorted(opened.weights.items()):
            digest.update(f"{name} {opened.plain[weight_name]} {weight.shape} {weight.kind}".encode())
            if weight.change is not None:
                stored = weight.blocks[0].stored_shape
                numbers = np.arange(np.prod(stored), dtype=np.float32).reshape(stored)
                digest.update(np.ascontiguousarray(weight.change(numbers)).tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_of_weights_has_another_number(kind, checkpoint, mesh):
    assert order(kind, checkpoint, mesh) == ORDERS[FORMAT_VERSION][kind]


def test_what_is_there_is_kept_and_a_converted_one_can_be_the_source(folder, tmp_path, capsys):
    assert main(["weights", "convert", str(folder), str(tmp_path)]) == 0
    first = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert (tmp_path / "transformer" / FILE) in first
    (tmp_path / "vae" / MANIFEST).unlink()
    (tmp_path / "text_encoder" / FILE).unlink()
    spoil(tmp_path, {"layout": 0}, "transformer")  # of an older version
    assert main(["weights", "convert", str(folder), str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("exists already") == 1
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == first


def test_source_that_has_changed_leaves_nothing_of_what_it_was(checkpoint, tmp_path, mesh, capsys):
    """Other weights of the same name, size and time are other weights; so are those of another source."""
    kind, source, destination = "wan2.1-t2v-1.3b", tmp_path / "source", tmp_path / "destination"
    assert main(["weights", "convert", str(checkpoint(kind)), str(destination)]) == 0
    subprocess.run(["cp", "-r", checkpoint(kind), source], check=True)
    assert main(["weights", "convert", str(source), str(destination)]) == 0
    assert "exists already" not in capsys.readouterr().out
    (file,) = (source / "vae").glob("*.safetensors")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    save_file({name: value * 2 for name, value in load_file(file).items()}, file)
    os.utime(file, ns=times)
    add_presets_with_adapters(source)

    assert main(["weights", "convert", str(source), str(destination)]) == 0

    assert capsys.readouterr().out.count("exists already") == 2
    component = open_model(Checkpoint(source)).components["decoder"]
    ours, expected = (load_component(Checkpoint(x), component, "bfloat16", mesh).params for x in (destination, source))
    for name, array in ours.items():
        assert np.array_equal(np.asarray(array), np.asarray(expected[name])), name
    loras = dict(dict(Checkpoint(destination).sampling().presets)["fast"].settings)["loras"]
    assert [os.path.relpath(lora.path, destination) for lora in loras] == ["adapters/a.safetensors", "adapters/b"]
    for lora in loras:
        own = lora.path.replace("destination", "source")
        changes = [read(find(path), path)["x"] for path in (lora.path, own)]
        assert changes[0].gain == changes[1].gain
        assert torch.equal(changes[0].tensors["up"], changes[1].tensors["up"])

    assert main(["weights", "convert", str(checkpoint(kind)), str(destination)]) == 2
    assert "wan_tpu.json" in capsys.readouterr().err


def add_presets_with_adapters(folder):
    """Give a checkpoint a preset with a file and a folder of its own, and one that lies elsewhere."""
    (folder / "adapters" / "b").mkdir(parents=True)
    pair = {"x.lora_down.weight": torch.ones(2, 3), "x.lora_up.weight": torch.randn(3, 2)}
    save_file(pair | {"x.alpha": torch.tensor(3.0)}, folder / "adapters" / "a.safetensors")
    save_file(pair, folder / "adapters" / "b" / "adapter_model.safetensors")
    (folder / "adapters" / "b" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4}))
    loras = ["./adapters/a.safetensors:0.5", {"path": "./adapters/b"}]
    presets = {"fast": {"about": "few", "source": "https://x", "settings": {"loras": loras}}}
    presets["hub"] = {"about": "few", "source": "https://x", "settings": {"loras": ["owner/name"]}}
    (folder / "wan_tpu.json").write_text(json.dumps({"presets": presets}))


def test_preset_whose_adapter_is_not_there_is_refused_before_anything_is_written(checkpoint, tmp_path, capsys):
    source, destination = tmp_path / "source", tmp_path / "destination"
    subprocess.run(["cp", "-r", checkpoint("wan2.1-t2v-1.3b"), source], check=True)
    add_presets_with_adapters(source)
    (source / "adapters" / "a.safetensors").unlink()
    assert main(["weights", "convert", str(source), str(destination)]) == 2
    assert "preset fast has the adapter ./adapters/a.safetensors" in capsys.readouterr().err
    assert not destination.exists()


def spoil(folder, change, component="vae"):
    path = folder / component / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def damage(folder):
    path = folder / "vae" / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoiled", "dtype", "message"),
    [
        (
            damage,
            "bfloat16",
            r"vae/wan_tpu.safetensors is damaged in bytes \d+ to \d+, which hold .*; delete it, and convert",
        ),
        (lambda f: (f / "vae" / MANIFEST).unlink(), "bfloat16", "its conversion didn't finish"),
        (
            lambda f: spoil(f, {"layout": 0}),
            "bfloat16",
            f"converted for layout 0, but this version reads layout {FORMAT_VERSION}",
        ),
        (lambda f: spoil(f, {"bytes": 7}), "bfloat16", "bytes instead of 7; convert the checkpoint again"),
        (lambda f: spoil(f, {"tensors": {}}), "bfloat16", "lacks .*; convert the checkpoint again"),
        (
            lambda f: None,
            "float32",
            "was converted to bfloat16; give --precision bfloat16, or the original checkpoint for float32",
        ),
    ],
)
def test_what_is_wrong_is_named(spoiled, dtype, message, folder, tmp_path, mesh):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    spoiled(copy)
    with pytest.raises(CheckpointError, match=message):
        pipe = load_pipeline(copy, dtype, mesh)
        pipe.check_components()
        pipe.runtime.component("decoder")


def test_a_destination_that_can_not_be_is_refused(folder, capsys):
    assert main(["weights", "convert", str(folder), str(folder)]) == 2
    assert "source" in capsys.readouterr().err
    assert main(["weights", "convert", str(folder), "/proc/nothing"]) == 2
    assert "can't write /proc/nothing" in capsys.readouterr().err
