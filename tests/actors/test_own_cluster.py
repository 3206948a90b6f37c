"""The cluster that `wan-tpu serve` starts for a model on one machine."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

from actors.commands import own_cluster
from actors.commands.serve_arguments import build_serve_parser
from cluster.emulation.cluster import EmulatedSlice, Settings
from cluster.errors import ClusterNotFound
from cluster.gang import devices
from cluster.layout import Layout
from cluster.slice_spec import DEVICES, SliceSpec
from tests.actors.on_service.conftest import free_port
from tests.conftest import ROOT

SMALL = str(ROOT / "examples" / "small-wan2.2-i2v")


@pytest.fixture
def chips(monkeypatch):
    """Return a function that gives this machine device files, and the accelerator that its environment names."""

    def give(count, accelerator=None):
        files = [f"/dev/accel{i}" for i in range(count)]
        monkeypatch.setattr(devices.glob, "glob", lambda pattern, **_: files if "accel" in pattern else [])
        if accelerator is None:
            monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
        else:
            monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)

    return give


@pytest.mark.parametrize(
    ("count", "accelerator", "name", "kind"),
    [
        (8, "v6e-8", None, "v6e-8"),
        (8, "v5litepod-8", None, "v5e-8"),
        (4, "v6e-8", "v6e-4", "v6e-4"),  # What the user says counts.
        (0, "v6e-8", None, "v6e-1"),  # Without chips it is emulated.
        (4, "v6e-8", None, None),
        (4, "v6e-16", None, None),  # One of several machines.
    ],
)
def test_slice_of_a_machine_is_found(chips, count, accelerator, name, kind):
    chips(count, accelerator)
    if kind is None:
        with pytest.raises(ClusterNotFound):
            own_cluster.find_slice(name)
    else:
        assert own_cluster.find_slice(name) == SliceSpec(kind)


def test_layout_of_a_machine_hosts_the_whole_model(chips, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for count, emulated in ((8, None), (0, 1)):
        chips(count, "v6e-8")
        args = build_serve_parser().parse_args(["--model", SMALL, "--folder", str(tmp_path)])
        assert own_cluster.wants_own_cluster(args)
        kind = own_cluster.fill_arguments(args)
        layout = Layout.parse(args.layout_text, "own")
        assert [pool.slice for pool in layout.pools] == [kind] and layout.devices_per_host == emulated
        assert layout.pools[0].stages == ("encoder", "denoise_high", "denoise_low", "decoder")
        assert not own_cluster.wants_own_cluster(args)  # It has a layout.


def test_host_with_chips_is_no_emulated_one(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    real, emulated = (EmulatedSlice("v6e-8-0", SliceSpec("v6e-8"), count).host(0, Settings()) for count in (None, 1))
    assert DEVICES not in real.labels and emulated.labels[DEVICES] == "1"
    assert real.resources == emulated.resources
    assert real.variables.items() >= {"TPU_WORKER_ID": "0", "JAX_PLATFORMS": "tpu,cpu"}.items()
    assert not emulated.variables


def test_head_doesn_t_offer_the_chips_of_its_machine(chips):
    chips(8, "v6e-8")
    head = Settings().head()
    found = ResourceAndLabelSpec(1, 0, 2**30, 2**28, resources=dict(head.resources), labels=dict(head.labels))
    found.resolve(is_head=True, node_ip_address="127.0.0.1")
    assert "TPU" not in found.to_resource_dict() and not found.labels


@pytest.mark.long
def test_serve_needs_only_a_model(tmp_path):
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "actors.cli", "serve", "--model", SMALL, "--dtype", "float32"]
    command += ["--port", str(port), "--folder", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert f"http://127.0.0.1:{port}" in line
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
            assert json.load(answer)["data"]
        cluster = own_cluster.EmulatedCluster.attach(tmp_path)
        assert cluster.running
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert not cluster.running and not (tmp_path / "cluster.json").exists()
