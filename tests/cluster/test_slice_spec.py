"""Kinds of slices by name, and the table of chips under them."""

import math

import pytest
from jax._src import tpu_info

from cluster.chips import ANNOUNCED, CHIPS
from cluster.errors import UnknownSlice
from cluster.gang.placement import explain_other_machines
from cluster.slice_spec import SliceSpec, list_kinds, name_slice


@pytest.mark.parametrize(
    ("name", "topology", "chips", "hosts", "devices"),
    [
        ("v6e-1", "1x1", 1, 1, 1),
        ("v6e-4", "2x2", 4, 1, 4),
        ("v6e-8", "2x4", 8, 1, 8),
        ("v6e-16", "4x4", 16, 4, 16),
        ("v5p-8", "2x2x1", 4, 1, 4),  # named by cores
        ("v5p-16", "2x2x2", 8, 2, 8),
        ("v7x-4", "2x2x1", 4, 1, 8),  # two devices a chip
        ("tpu7x:2x2x1", "2x2x1", 4, 1, 8),
        ("v5e-8", "2x4", 8, 1, 8),
    ],
)
def test_names_mean_what_google_means(name, topology, chips, hosts, devices):
    kind = SliceSpec(name)
    assert (kind.topology, kind.chips, kind.hosts, kind.devices) == (topology, chips, hosts, devices)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v6e-6", "v6e-8"),
        ("v5p-6", "v5p-8"),
        ("v6e:3x3", "v6e-8"),
        ("v7-4", "v7x-4"),
        ("v6-8", "v6e-8"),
        ("h100", "v6e-8"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(UnknownSlice, match=nearest):
        SliceSpec(name)


@pytest.mark.parametrize("name", ["v8i-8", "tpu8t:2x2x1"])
def test_slice_of_an_announced_generation_is_refused_by_name(name):
    with pytest.raises(UnknownSlice, match=rf"{name}: libtpu .* TPU8[it] "):
        SliceSpec(name)


@pytest.mark.parametrize("chip", ANNOUNCED.values(), ids=ANNOUNCED)
def test_figures_of_an_announced_generation_are_jax_s(chip):
    known = tpu_info.get_tpu_info_for_chip(tpu_info.chip_version_from_device_kind(chip.jax_kind), 1)
    assert known.chip_version.num_physical_tensor_cores_per_chip == chip.cores
    of_core = (known.hbm_capacity_bytes, known.mem_bw_bytes_per_second, known.bf16_ops_per_second)
    assert [chip.cores * figure for figure in (*of_core, known.fp8_ops_per_second)] == pytest.approx(
        [chip.hbm_bytes, chip.hbm_bytes_per_s, chip.bf16_flops, chip.mxu_8bit_flops]
    )


def test_every_listed_kind_can_be_named():
    for name in list_kinds():
        kind = SliceSpec(name)
        assert kind.name == name
        assert kind.chips == kind.hosts * math.prod(kind.host_shape)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_name_of_so_many_chips_means_them(chip):
    for chips in chip.sizes:
        assert SliceSpec(name_slice(chip, chips)).chips == chips


def test_only_whole_tori_wrap():
    assert SliceSpec("v6e-256").wraps == (True, True)
    assert SliceSpec("v6e-128").wraps == (False, True)
    assert SliceSpec("v6e-16").wraps == (False, False)
    assert SliceSpec("v5p:4x4x4").wraps == (True, True, True)
    assert SliceSpec("v5p:2x4x4").wraps == (False, False, False)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_peak_is_what_the_matrix_units_do_in_a_second(chip):
    """A systolic array of 128 or 256 squared does two operations per cell and cycle, so peaks are whole MXUs."""
    side = 256 if chip.name in ("v6e", "v7x") else 128
    arrays = chip.bf16_flops / (chip.cores * chip.clock_hz * 2 * side**2)
    assert arrays == pytest.approx(4, rel=0.005)


@pytest.mark.parametrize("name", list_kinds())
def test_ray_spells_it_the_same(name):
    """Ray's own functions set the labels and resources of real hosts."""
    from ray._private.accelerators import tpu

    spec = SliceSpec(name)
    accelerator = spec.build_host_labels(0, "s")["ray.io/accelerator-type"]
    assert tpu.infer_tpu_pod_type_from_topology(spec.topology, accelerator) == spec.pod_type
    generation = spec.pod_type.split("-")[0]
    assert tpu.get_total_chips_from_accelerator_type(spec.pod_type) == spec.chips
    if spec.topology != "1x1x1":  # one v7x chip alone: Google offers it, Ray's table has none
        assert tpu.TPUAcceleratorManager.is_valid_tpu_accelerator_topology(generation, spec.topology)
        assert tpu.get_chips_per_host(spec.topology, generation) == spec.chips_per_host
    assert tpu.TPUAcceleratorManager.validate_resource_request_quantity(spec.build_host_resources(1)["TPU"])[0]


def test_a_slice_of_other_machines_is_named():
    """2x4 chips of v6e are one machine of eight, or two of four."""
    spec = SliceSpec("v6e-8")
    node = {"Alive": True, "Labels": spec.build_host_labels(0, "a"), "Resources": {"TPU": 4.0}}
    assert (
        "machines of that kind have 4 chips, but those of a v6e-8 must have 8 (on GKE ct6e-standard-8t)"
        in explain_other_machines(spec, [node])
    )
    assert explain_other_machines(spec, [node | {"Resources": {"TPU": 8.0}}]) is None
    assert explain_other_machines(SliceSpec("v6e-16"), [node]) is None


def test_hosts_ask_for_what_ray_and_gke_give_them():
    spec = SliceSpec("v6e-16")
    assert spec.build_host_resources(0) == {"TPU": 4, "TPU-v6e-16-head": 1}
    assert spec.build_host_resources(3) == {"TPU": 4}
    assert spec.host_selector == {"ray.io/tpu-pod-type": "v6e-16", "ray.io/tpu-topology": "4x4"}
    assert spec.host_selector.items() <= spec.build_host_labels(3, "a").items()
    assert SliceSpec("v5e-8").pod_type == "v5litepod-8"
    assert SliceSpec("v7x-4").pod_type == "v7x-8"  # Ray counts cores
    assert spec.gke_selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
