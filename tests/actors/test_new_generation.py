"""A TPU generation is one file of facts: an invented one is parsed and provisioned."""

import pytest
import yaml

from actors.cli import main
from cluster import chips
from cluster.chips import CHIPS, Chip, load
from cluster.errors import UnknownSlice
from cluster.slice_spec import SliceSpec

INVENTED = """
name: v99
jax_kind: TPU v99 max
compiler: tpu99
devices: 2
cores: 4
size_unit: cores
usable_gib: 400
hbm_bytes_per_s: 20e12
bf16_flops: 8e15
clock_hz: 2e9
mxu_8bit_dtype: float8_e4m3fn
ici_link_bytes_per_s: 200e9
core_link_bytes_per_s: 900e9
topologies: [2x1, 2x2, 2x4, 4x8, 8x8]
ring_size: 8
host_shape: 2x2
one_host_chips: [2, 4]
ray_accelerator: TPU-V99
device_files: 2
gke_accelerator: tpu-v99-slice
gke_machines: {2: ct99-2t, 4: ct99-4t}
tpu_vm_runtime: v2-alpha-tpuv99
"""
LAYOUT = """
pools:
  encoder-decoder: {stages: [encoder, decoder], slice: v99-8}
  denoise: {stages: [denoise], slice: v99-32}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "v99.yaml"
    path.write_text(INVENTED)
    return path


@pytest.fixture(autouse=True)
def invented_chip(file, monkeypatch):
    """All that is done to the package: it reads one more file."""
    monkeypatch.setitem(CHIPS, "v99", load(file, Chip))


@pytest.fixture
def layout(tmp_path):
    path = tmp_path / "layout.yaml"
    path.write_text(LAYOUT)
    return str(path)


def test_every_file_of_the_folder_is_a_generation():
    folder = chips.resources.files("cluster") / "generations"
    assert {file.name for file in folder.iterdir()} == {f"{name}.yaml" for name in CHIPS if name != "v99"}


def test_its_slices_are_parsed():
    kind = SliceSpec("v99-32")  # By cores, of which a chip has four.
    assert (kind.topology, kind.chips, kind.hosts, kind.devices, kind.wraps) == ("2x4", 8, 2, 16, (False, False))
    assert (kind.pod_type, kind.build_host_resources(1)) == ("v99-32", {"TPU": 4.0})
    assert SliceSpec("v99:4x8").wraps == (False, True)
    assert SliceSpec("tpu99:2x2").chip is CHIPS["v99"]
    with pytest.raises(UnknownSlice, match=r"v99-40.*v99-32"):
        SliceSpec("v99-40")


def test_its_kubernetes_objects_are_written(layout, capsys):
    assert main(["manifests", "--image", "i", "--layout", layout]) == 0
    objects = {item["kind"]: item for item in yaml.safe_load_all(capsys.readouterr().out)}
    _, encoder_decoder, denoise = objects["RayCluster"]["spec"]["workerGroupSpecs"]
    assert (encoder_decoder["numOfHosts"], denoise["numOfHosts"]) == (1, 2)
    assert denoise["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v99-slice",
        "cloud.google.com/gke-tpu-topology": "2x4",
        "node.kubernetes.io/instance-type": "ct99-4t",
    }
    assert denoise["rayStartParams"]["resources"] == '"{\\"TPU\\": 4}"'


def test_its_tpu_vm_scripts_are_written(layout, tmp_path):
    where = ["--layout", layout, "--image", "i", "--project", "p", "--zone", "z", "--account", "a@b"]
    assert main(["hosts", str(tmp_path / "hosts"), *where]) == 0
    created = (tmp_path / "hosts" / "create.sh").read_text()
    assert "--accelerator-type v99-32 --runtime-version v2-alpha-tpuv99 " in created
    assert "v99-8.sh" in {path.name for path in (tmp_path / "hosts").iterdir()}


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ("cores: 4", "cores: many", r"v99\.yaml.*'many'"),
        ("cores: 4", "", r"v99\.yaml"),
        ("cores: 4", "cores: 4\nwheels: 4", r"v99\.yaml.*'wheels'"),
    ],
)
def test_wrong_file_of_a_generation_is_refused_with_the_reason(line, changed, message, file):
    file.write_text(INVENTED.replace(line, changed))
    with pytest.raises(ValueError, match=message):
        load(file, Chip)
